"""Writes the pictures of the viewer into docs/images, from run folders and with chromium.

    python docs/make_screenshots.py runs/quickstart [runs/another]

The pictures are to be looked at: aligned, readable, nothing over anything else, in both themes.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from pathlib import Path

from turnwise.inspect.attempts import AttemptKey, Query
from turnwise.view.server import ViewServer
from turnwise.view.watched_run import WatchedRun, WatchedRuns

FOLDER = Path(__file__).parent / "images"
WIDE, PHONE = (1240, 780), (390, 780)
ON_PHONES = ("curves", "attempts", "tokens", "tree")


def telling_group(run: WatchedRun) -> AttemptKey:
    """An attempt that succeeded where others of its group did not: early, and with several turns."""
    attempts = run.reader.attempts
    _, groups = attempts.groups(Query(kind="train", first_step=3, order="step", descending=False), limit=200)
    mixed = [group for group in groups if 0.2 < group["reward_mean"] < 0.8 and group["turns_mean"] > 3.5] or groups
    place = mixed[0]["step"], mixed[0]["group"]
    page = attempts.select(Query(kind="train", first_step=place[0], last_step=place[0], order="reward"), limit=500)
    return max((row for row in page.rows if row.key.group == place[1]), key=lambda row: (row.reward, row.turns)).key


def views(run: WatchedRun) -> dict[str, str]:
    key = telling_group(run)
    group = f"{run.name}/{key.kind}/{key.step}/{key.group}"
    attempts = run.reader.group(key.kind, key.step, key.group).group.trajectories
    # The attempt of the pictures: it failed, and sampled the least likely token of all that did.
    lost, turn, token = min(
        (
            (nth, place, int(turn.logprobs.argmin()))
            for nth, attempt in enumerate(attempts)
            if attempt.total == min(one.total for one in attempts)
            for place, turn in enumerate(attempt.turns)
        ),
        key=lambda at: attempts[at[0]].turns[at[1]].logprobs[at[2]],
    )
    return {
        "curves": "#/curves?smooth=0.5",
        "recipes": "#/recipes",
        "attempts": f"#/attempts/{run.name}?kind=train&order=turns&last_step=12",
        "groups": f"#/groups/{run.name}?kind=train&order=reward&descending=0",
        "attempt": f"#/attempt/{run.name}/{key}",
        "tokens": f"#/attempt/{group}/{lost}?view=tokens&colour=logprob&turn={turn}&token={token}",
        "credit": f"#/attempt/{group}/{lost}?view=tokens&turn={turn}&token={token}",
        "tree": f"#/group/{group}?colour=reward",
        "difference": f"#/difference/{group}/{key.attempt}/{lost}",
    }


def save(picture: bytes, path: Path) -> None:
    """A picture of 256 colours, chosen so that rare ones stay: a third of the size."""
    from PIL import Image

    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    few = whole.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def beside(pictures: list[bytes]) -> bytes:
    from PIL import Image

    parts = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    whole = Image.new("RGB", (sum(part.width + 16 for part in parts) - 16, parts[0].height), (128, 134, 144))
    for nth, part in enumerate(parts):
        whole.paste(part, (nth * (PHONE[0] + 16), 0))
    into = io.BytesIO()
    whole.save(into, "PNG")
    return into.getvalue()


def main() -> int:
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found,unused-ignore]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("install chromium: make test-browser does")
    runs = WatchedRuns.open(chosen.runs)
    runs.read_all()
    addresses = views(next(iter(runs)))
    with runs, ViewServer(runs) as server, sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"] if os.geteuid() == 0 else [], timeout=120_000
        )

        def taken(address: str, size: tuple[int, int], theme: str) -> bytes:
            page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=theme)
            page.goto(server.url + address)
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(800)
            picture: bytes = page.screenshot()
            page.close()
            return picture

        for name, address in addresses.items():
            for theme, end in (("light", ""), ("dark", "-dark")):
                save(taken(address, WIDE, theme), chosen.out / f"view-{name}{end}.png")
        phones = [
            taken(addresses[name], PHONE, theme) for name, theme in zip(ON_PHONES, ("light", "dark") * 2, strict=True)
        ]
        save(beside(phones), chosen.out / "view-phone.png")
        browser.close()
    shutil.copyfile(chosen.out / "view-tokens.png", chosen.out / "token-inspector.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
