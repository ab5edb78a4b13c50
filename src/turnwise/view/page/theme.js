// Light, dark, or as the system says.

const CHOICES = ["auto", "light", "dark"];

export function chosenTheme() {
  try {
    const stored = localStorage.getItem("turnwise-theme");
    return CHOICES.includes(stored) ? stored : "auto";
  } catch {
    return "auto"; // a page in a file may have no storage
  }
}

export function setTheme(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  try {
    localStorage.setItem("turnwise-theme", choice);
  } catch {
    // then it lasts as long as the page
  }
  window.dispatchEvent(new Event("theme"));
}

export function nextTheme(choice) {
  return CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
}
