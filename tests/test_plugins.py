"""Parts by group and name: built-in ones, and the entry points of installed packages."""

import sys

import pytest

from hydrajax import plugins
from hydrajax.errors import HydrajaxError


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return ``install(package, entry_points, **modules)``, which puts a distribution on the path of this process."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def put(package: str, entry_points: str, **modules: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
        plugins._installed.cache_clear()
        plugins.declared.cache_clear()

    yield put
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]
    plugins._installed.cache_clear()
    plugins.declared.cache_clear()


def test_every_built_in_part_is_there():
    for group, names in plugins.BUILT_IN.items():
        assert all(plugins.find(group, name) is not None for name in names)
    with pytest.raises(HydrajaxError, match="rules: got 'nothing', expected greedy, typical, exact, rejection"):
        plugins.find("rules", "nothing")


def test_a_package_adds_a_part_that_is_imported_when_it_is_named(install):
    install("strange", "[hydrajax.rules]\nstrange = strange_rules:RULE\n", strange_rules="RULE = 5")
    assert list(plugins.Group("rules"))[-1] == "strange"
    assert "strange" in plugins.Group("rules")
    assert "strange_rules" not in sys.modules
    assert "strange" not in plugins.imported("rules")
    assert plugins.find("rules", "strange") == 5
    assert "strange" in plugins.imported("rules")


def test_a_part_that_a_process_adds_is_imported(monkeypatch):
    monkeypatch.setitem(plugins.ADDED, "rules", {})
    plugins.add("rules", "mine", 5)
    assert "mine" in plugins.imported("rules")
    assert plugins.find("rules", "mine") == 5


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("", "AttributeError: module 'strange_rules' has no attribute 'RULE'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(install, source, reason):
    install("strange", "[hydrajax.rules]\nstrange = strange_rules:RULE\n", strange_rules=source)
    what = r"rules: 'strange' of the package strange cannot be imported \(strange_rules:RULE\)"
    with pytest.raises(HydrajaxError, match=f"^{what}: {reason}$"):
        plugins.find("rules", "strange")


def test_a_built_in_name_is_not_replaced(install):
    install("strange", "[hydrajax.rules]\ngreedy = strange_rules:RULE\n", strange_rules="RULE = 5")
    with pytest.warns(UserWarning, match="rules: 'greedy' of the package strange is ignored: the name is built in"):
        assert list(plugins.Group("rules")).count("greedy") == 1
    assert plugins.find("rules", "greedy").__name__ == "Greedy"


def test_a_name_of_two_packages_is_refused(install):
    for package in ("one", "two"):
        install(package, f"[hydrajax.rules]\nstrange = {package}:RULE\n", **{package: "RULE = 5"})
    with pytest.raises(HydrajaxError, match=r"'strange' of the packages (one and two|two and one); uninstall"):
        plugins.find("rules", "strange")


def test_metadata_older_than_the_code_are_reported(tmp_path, monkeypatch):
    """An editable installation does not see entry points that were added later."""
    project = tmp_path / "pyproject.toml"
    monkeypatch.setattr(plugins, "__file__", str(tmp_path / "hydrajax" / "plugins.py"))
    assert plugins.outdated() == ""
    project.write_text('[project.scripts]\nhydrajax = "hydrajax.cli:main"\n')
    assert plugins.outdated() == ""
    project.write_text('[project.entry-points."hydrajax.rules"]\nnewer = "hydrajax.newer:RULE"\n')
    assert plugins.outdated().endswith("older than its code: run 'pip install -e .' in its folder again")
