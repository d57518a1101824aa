"""Says what an exported file needs, and whether it loads here: option `--check` of the export."""

import zipfile
from pathlib import Path

from .formats import FORMATS
from .native import AOTI_LIBRARY, DOMAIN, INTERFACE, ort_library
from .runtime import load


def kind_of(path: Path) -> str | None:
    """The format of a file, by its name; None for other names."""
    kinds = sorted(FORMATS, key=lambda kind: -len(FORMATS[kind].suffix))
    return next((kind for kind in kinds if path.name.endswith(FORMATS[kind].suffix)), None)


def check(path: Path) -> tuple[list[str], bool]:
    """Returns lines about an exported file, and whether it loads here.

    Raises:
        ValueError: a name that no format has, or a file that is not of the format that its name says, or not complete.
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: a file of ONNX, without the packages of ONNX.
    """
    kind = kind_of(path)
    if kind is None:
        suffixes = ", ".join(form.suffix for form in FORMATS.values())
        raise ValueError(f"--check is {path}, expected a name that ends in one of {suffixes}")
    if not path.is_file():
        raise FileNotFoundError(f"--check is {path}, but there is no such file")
    if FORMATS[kind].is_onnx:
        lines, library = _describe_onnx(path)
    elif not zipfile.is_zipfile(path):  # torch would print a traceback
        raise ValueError(f"{path} is not of the format {FORMATS[kind].title} (not a ZIP archive)")
    elif kind == "aoti":
        with zipfile.ZipFile(path) as package:
            if not any(name.endswith(f"/{AOTI_LIBRARY}") for name in package.namelist()):
                raise ValueError(f"{path} holds no kernels of vilonghorn ({AOTI_LIBRARY}): export the model again")
        lines, library = [f"{path}: {FORMATS[kind].title}", "needs torch; it holds the kernels of vilonghorn"], None
    else:
        lines, library = [f"{path}: {FORMATS[kind].title}", "needs torch"], None
    try:
        load(kind, str(path), library)
    except Exception as error:  # of every kind that torch or onnxruntime raises
        return [*lines, f"it does not load here: {error}"], False
    return [*lines, "it loads here"], True


def _describe_onnx(path: Path) -> tuple[list[str], str | None]:
    """Lines about an ONNX file, and the library that it needs, if any."""
    import onnx

    try:
        model = onnx.load(path)
    except Exception as error:  # of protobuf, or of onnx for a file of weights that is missing
        raise ValueError(f"{path} is not an ONNX file that can be read ({error})") from error
    lines = [f"{path}: ONNX, opset " + ", ".join(f"{o.version} of {o.domain or 'ONNX'}" for o in model.opset_import)]
    for title, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            sizes = [size.dim_param or str(size.dim_value) for size in value.type.tensor_type.shape.dim]
            lines.append(f"{title} {value.name}: float32, {' x '.join(sizes)}")
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    if not nodes:
        return [*lines, "needs onnxruntime, or another runtime of ONNX"], None
    found = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in nodes[0].attribute}
    if not (isinstance(found.get("interface"), int) and isinstance(found.get("version"), bytes)):
        raise ValueError(f"{path}: its node {nodes[0].op_type} lacks interface or version; export the model again")
    interface, version, library = found["interface"], found["version"].decode(), ort_library()
    return [
        *lines,
        f"needs onnxruntime 1.17 or later, and {library.name} of vilonghorn {version} "
        f"(interface {interface} of its operators; {INTERFACE} here), registered with the session before it opens "
        "the file. Where it is not registered, onnxruntime says: "
        f"{DOMAIN}:{nodes[0].op_type}(-1) is not a registered function/op",
        f"the library of this installation is {library}",
    ], str(library)
