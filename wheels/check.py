"""Checks the wheels of a folder: what each holds, and what its libraries export and need. Usage: check.py [dist]."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import lief

ROOT = Path(__file__).parents[1]
HEADER = (ROOT / "kernels" / "include" / "vilonghorn.h").read_text()
EXPORTS = set(re.findall(r"VL_EXPORT[^;(]*?(vl_\w+)\(", HEADER)) | {"RegisterCustomOps"}  # the latter for onnxruntime
CUDA = {name for name in EXPORTS if name.startswith("vl_cuda_")}
SUFFIX = {"manylinux": "so", "macosx": "dylib", "win": "dll"}
# What a library may ask of the system. No libstdc++, libomp or libcudart: these differ between machines.
SYSTEM = re.compile(
    r"lib(c|m|dl|rt|pthread)\.so\.\d|ld-linux-\S+|/usr/lib/libSystem\.B\.dylib|(api-ms-win-crt-\S+|kernel32|ntdll|ucrtbase)\.dll",
    re.IGNORECASE,
)


def check(wheel: Path) -> str:
    """A line about a wheel; raises ValueError with all that is wrong."""
    wrong, sizes = [], []
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        files = *(ROOT / "vilonghorn").rglob("*.py"), *(ROOT / "vilonghorn" / "weights").iterdir()
        sources = {path.relative_to(ROOT).as_posix() for path in files}
        sources |= {"vilonghorn/py.typed"}
        wrong += [f"{name} is missing" for name in sorted(sources - names)]
        wrong += [f"{name} is no part of the package" for name in names if not name.startswith("vilonghorn")]
        suffix = next(value for key, value in SUFFIX.items() if key in wheel.name)
        libraries = [name for name in names if "/_lib/" in name]
        if f"vilonghorn/_lib/libvilonghorn_cpu.{suffix}" not in libraries:
            wrong.append("the CPU kernels are missing")
        for name in libraries:
            data = archive.read(name)
            library = lief.parse(data)
            exported = {function.name.lstrip("_") for function in library.exported_functions}
            if suffix == "dylib":  # zig has no way to hide these; all definitions of them are alike
                exported = {name for name in exported if not re.match("Zn[aw]|Zd[al]|dso_handle|mh_dylib", name)}
            expected = CUDA | {"vl_abi"} if "_cuda" in name else EXPORTS - CUDA
            if exported != expected:
                wrong.append(f"{name} exports {sorted(exported - expected)}, and lacks {sorted(expected - exported)}")
            needed = {getattr(other, "name", other) for other in library.libraries} - {f"@rpath/{Path(name).name}"}
            wrong += [f"{name} needs {other}" for other in sorted(needed) if not SYSTEM.fullmatch(other)]
            sizes.append(f"{name.rpartition('/')[2]} {len(data) / 1e6:.1f} MB")
    if "manylinux" in wheel.name:
        shown = subprocess.run(["auditwheel", "show", wheel], capture_output=True, text=True, check=True).stdout
        if not re.search(r'the following platform tag:\s+"manylinux_2_(5|12|17)_', shown):
            wrong.append(shown)
    if wrong:
        raise ValueError(f"{wheel.name}: " + "; ".join(wrong))
    return f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {len(names)} files; {', '.join(sorted(sizes))}"


if __name__ == "__main__":
    wheels = sorted(Path(sys.argv[1] if len(sys.argv) > 1 else "dist").glob("*.whl"))
    if not wheels:
        sys.exit("check.py: no wheels here")
    for wheel in wheels:
        print(check(wheel))
