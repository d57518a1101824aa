"""What a run records of its machine."""

from vilonghorn.engine import environment


def test_a_package_on_the_path_that_is_not_installed_has_an_unknown_version(tmp_path, monkeypatch):
    (tmp_path / "copied.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "PACKAGES", ("copied", "absent", "numpy"))
    found = environment.machine()
    assert (found["copied"], found["absent"]) == ("unknown", None) and found["numpy"][0].isdigit()
