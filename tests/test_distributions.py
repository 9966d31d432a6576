"""What a wheel and an sdist hold: all that the repository has for them, and nothing else."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

import hybridtensor

ROOT = Path(__file__).parent.parent
BUILD = """
import sys
from setuptools import build_meta
(out,) = sys.argv[1:]  # which building replaces
for build in (build_meta.build_wheel, build_meta.build_sdist):
    build(out)
"""


def tracked(*folders):
    """Names of files that git knows, or, in an unpacked sdist, of those that are there."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return set(listed.stdout.split("\n")) - {""}
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names of the files in a wheel and in an sdist that are built of what git knows, and the wheel's metadata."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for name in tracked("."):
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    (source / "hybridtensor" / "__pycache__").mkdir()
    (source / "hybridtensor" / "__pycache__" / "stray.pyc").write_bytes(b"")
    run = subprocess.run([sys.executable, "-c", BUILD, out], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in in_wheel if ".dist-info/" in name}
        metadata = BytesParser().parsebytes(archive.read(f"{info}/METADATA"))
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return in_wheel, in_sdist, metadata, scripts


def test_the_wheel_holds_the_package_and_nothing_else(built):
    in_wheel, _, metadata, scripts = built
    package = {name for name in tracked("hybridtensor") if name.endswith((".py", "py.typed", ".html"))}
    assert len(package) > 150
    assert "hybridtensor/py.typed" in package
    assert {name for name in in_wheel if ".dist-info/" not in name} == package
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel)
    assert metadata["Version"] == hybridtensor.__version__
    assert "hybridtensor = hybridtensor.__main__:main" in scripts


def test_the_sdist_holds_the_repository(built):
    _, in_sdist, _, _ = built
    expected = {name for name in tracked(".") if not name.startswith(".") and not name.endswith("ruff.toml")}
    assert expected <= in_sdist
    made = {name for name in in_sdist - expected if ".egg-info/" not in name}
    assert made == {"PKG-INFO", "setup.cfg"}


def test_all_extras_are_in_the_metadata(built):
    _, _, metadata, _ = built
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(metadata.get_all("Provides-Extra")) == set(declared["optional-dependencies"])
    required = {name for name in metadata.get_all("Requires-Dist") if "extra ==" not in name}
    assert required == {name.replace(" ", "") for name in declared["dependencies"]}


def test_the_changelog_has_the_version():
    assert f"\n## {hybridtensor.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
