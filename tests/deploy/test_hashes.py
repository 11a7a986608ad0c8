"""deploy/install.py installs what constraints.txt has a hash of, and nothing else: real pip, wheels in a folder."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sample]

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "deploy" / "install.py"


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """A wheel of `files` by path, without dependencies."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    files = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    } | files
    with zipfile.ZipFile(path, "w") as made:
        for inside, content in files.items():
            made.writestr(inside, content)
        made.writestr(f"{about}/RECORD", "".join(f"{inside},,\n" for inside in [*files, f"{about}/RECORD"]))
    return path


def packed(folder: Path, name: str) -> Path:
    """The installed distribution `name` as a wheel again."""
    here = distribution(name)
    files = {
        str(file): Path(str(here.locate_file(file))).read_bytes()
        for file in here.files or []
        if ".." not in file.parts and file.suffix != ".pyc" and file.name not in ("RECORD", "METADATA", "WHEEL")
    }
    return wheel(folder, name, here.version, files)


def pin(file: Path) -> str:
    name, version = file.name.split("-")[:2]
    return (
        f"{name}=={version.partition('+')[0]} \\\n    --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"
    )


class Place:
    """A folder of wheels, constraints and a project that asks for `dep`; an environment with the pip that Python
    brings."""

    def __init__(self, path: Path) -> None:
        self.path, self.links = path, path / "links"
        self.links.mkdir()
        self._python = path / "env" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(path / "env")], check=True)
        self.tools = "".join(pin(packed(self.links, name)) for name in ("pip", "setuptools"))

    def install(self, asked: str, constraints: str) -> subprocess.CompletedProcess[str]:
        """Run deploy/install.py for a project with these dependencies."""
        checkout = self.path / "checkout"
        (checkout / "deploy").mkdir(parents=True, exist_ok=True)
        (checkout / "deploy" / "install.py").write_bytes(INSTALL.read_bytes())
        (checkout / "pyproject.toml").write_text(f'[project]\nname = "p"\ndependencies = {asked}\n')
        (checkout / "constraints.txt").write_text(self.tools + constraints)
        return subprocess.run(
            [str(self._python), str(checkout / "deploy" / "install.py")],
            capture_output=True,
            text=True,
            check=False,
            env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.links), "PIP_CONFIG_FILE": "/dev/null"},
        )

    def has(self, module: str) -> bool:
        done = subprocess.run([str(self._python), "-c", f"import {module}"], capture_output=True, check=False)
        return done.returncode == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("hashes"))


def test_what_has_its_hash_is_installed_even_by_an_old_pip(place: Place) -> None:
    file = wheel(place.links, "good", "1.0", {"good.py": b""})
    done = place.install('["good"]', pin(file))
    assert done.returncode == 0, done.stderr
    assert place.has("good")


def test_a_changed_wheel_is_refused(place: Place) -> None:
    file = wheel(place.links, "tampered", "1.0", {"tampered.py": b"x = 1"})
    pinned = pin(file)
    wheel(place.links, "tampered", "1.0", {"tampered.py": b"x = 2"})
    done = place.install('["tampered"]', pinned)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr
    assert not place.has("tampered")


def test_a_changed_dependency_of_a_dependency_is_refused(place: Place) -> None:
    deep = wheel(place.links, "deep", "1.0", {"deep.py": b"x = 1"})
    about = b"Metadata-Version: 2.1\nName: outer\nVersion: 1.0\nRequires-Dist: deep\n"
    outer = wheel(place.links, "outer", "1.0", {"outer.py": b"", "outer-1.0.dist-info/METADATA": about})
    pinned = pin(outer) + pin(deep)
    wheel(place.links, "deep", "1.0", {"deep.py": b"x = 2"})
    done = place.install('["outer"]', pinned)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr
    assert not place.has("deep") and not place.has("outer")


def test_what_constraints_do_not_list_is_refused(place: Place) -> None:
    wheel(place.links, "unlisted", "1.0", {"unlisted.py": b""})
    done = place.install('["unlisted"]', "")
    assert done.returncode != 0 and "unlisted" in done.stderr
    assert not place.has("unlisted")


def test_torchs_build_for_this_machine_is_taken_and_checked_too(place: Place) -> None:
    wheel(place.links, "torch", "2.0", {"torch.py": b"build = 'cuda'"})
    cpu = wheel(place.links, "torch", "2.0+cpu", {"torch.py": b"build = 'cpu'"})
    pinned = pin(cpu)
    wheel(place.links, "torch", "2.0+cpu", {"torch.py": b"build = 'evil'"})
    refused = place.install('["torch"]', pinned)
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr
    assert not place.has("torch")
    wheel(place.links, "torch", "2.0+cpu", {"torch.py": b"build = 'cpu'"})
    done = place.install('["torch"]', pin(cpu))
    assert done.returncode == 0, done.stderr
    assert place.has("torch")
