"""A browser opens pages, does what a reader may do, and tells what ran of the markup in them."""

import re
import shutil
import subprocess
from typing import NamedTuple

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="a page is opened in Chromium")

# No dots, so that it may be the name of a module, and no letters that a name could not have. Each part breaks out of
# another place: text, attributes in any quotes or none, a script, JSON in a script, a comment, a title; ``rich`` makes
# links of the last one.
SCRIPTS = (
    "' onmouseover='ran(1)' x='\" onmouseover=\"ran(2)\" x=\" onmouseover=ran(3) autofocus onfocus=ran(4) x"
    "><script>ran(5)</script><img src=x onerror=ran(6)><svg onload=ran(7)></svg>"
    "</script><script>ran(8)</script></textarea></title></style><script>ran(9)</script>--><script>ran(10)</script>"
    "<a href='javascript:ran(11)'>a</a><details open ontoggle=ran(12)>b</details>"
    "<iframe srcdoc='<script>parent[\"ran\"](13)</script>'></iframe>"
    '\\"};ran(14);//${ran(15)}`;ran(16);\u2028ran(17)//'
    "[link=javascript:ran(18)]c[/link][bold]d[/bold]<!--data-->"
)
LINK = "javascript:ran(19)"  # all of an address

# Goes first into a page: what markup calls.
_RAN = """<script>
function ran(number) {
  const of = document.documentElement, before = of.getAttribute("ran");
  of.setAttribute("ran", before ? `${before} ${number}` : number);
}
</script>"""

# Goes last into a page: points at everything, follows every link, sets every control to all that it has.
_READER = """<script>
function look() {
  for (const one of document.querySelectorAll("*")) {
    one.dispatchEvent(new MouseEvent("mouseover"));
    if (one.autofocus) one.focus();
  }
  const moved = () => new MouseEvent("mousemove", { bubbles: true });
  for (const one of document.querySelectorAll("canvas")) one.dispatchEvent(moved());
  for (const one of document.querySelectorAll("a, summary")) one.click();
}
look();
for (const select of document.querySelectorAll("select")) for (const option of select.options) {
  select.value = option.value;
  select.dispatchEvent(new Event("input"));
}
look();
document.documentElement.setAttribute("read", "whole");
</script>"""


class Opened(NamedTuple):
    """What a browser made of a page.

    Attributes:
        ran: Numbers of the parts of ``SCRIPTS`` that ran.
        complaints: What its console says.
        page: The page as it is in the end.
    """

    ran: tuple[int, ...]
    complaints: tuple[str, ...]
    page: str


def opened(text, folder, *, reader=True):
    """Open a page of HTML whose files may be in ``folder``; without ``reader`` only look at it."""
    path = folder / "opened.html"
    if reader:
        text = text.replace("<head>", f"<head>{_RAN}", 1)
        before, end, after = text.rpartition("</body>")
        text = before + _READER + end + after
    path.write_bytes(text.encode())
    done = chromium(folder, "--dump-dom", path)
    page = done.stdout
    head = re.search(r"<html[^>]*>", page)[0]
    assert not reader or 'read="whole"' in head, done.stderr
    ran = re.search(r' ran="([^"]*)"', head)
    complaints = re.findall(r"CONSOLE:?\S* (.*)", done.stderr)
    return Opened(tuple(sorted({*map(int, ran[1].split())})) if ran else (), tuple(complaints), page)


def chromium(folder, *arguments):
    """Run the browser with a profile of its own."""
    path = arguments[-1].resolve().as_uri()
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=5000", "--enable-logging=stderr", "--v=0", *arguments[:-1], path,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
