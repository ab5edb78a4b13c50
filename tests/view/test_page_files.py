import hashlib
import re

from turnwise.view.page_files import FOLDER, page_files


def test_only_files_of_the_page_have_an_address():
    files = page_files()
    assert {"/", "/index.html", "/main.js", "/style.css", "/vendor/uPlot.esm.js"} <= set(files)
    assert all(file.kind for file in files.values())
    assert not [path for path in files if ".." in path or path.endswith((".py", "SUMS", "LICENSE"))]


def test_the_libraries_are_those_that_were_checked():
    folder = FOLDER / "vendor"
    lines = [line.split() for line in (folder / "SHA256SUMS").read_text().splitlines()]
    assert {name for _, name in lines} == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    for digest, name in lines:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_the_page_names_no_other_machine():
    """Nothing is fetched from elsewhere: no address with a host is in the page, but names of XML."""
    for path, file in page_files().items():
        if "/vendor/" not in path:
            assert b"http" not in file.content.replace(b"http://www.w3.org/2000/svg", b""), path


def test_the_page_asks_for_all_its_modules_at_once():
    """Without that a browser learns of a module only when it has read the one that imports it."""
    files = page_files()
    named = set(re.findall(r'(?:href|src)="([^"]+\.js)"', files["/index.html"].content.decode()))
    assert {f"/{name}" for name in named} == {path for path in files if path.endswith(".js")}
