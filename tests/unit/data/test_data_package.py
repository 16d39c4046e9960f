from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import manyhands.data


def test_importing_the_package_and_its_modules_without_torch():
    code = (
        "import sys, manyhands.data, manyhands.data.mnist_files, manyhands.data.digits_bundle\n"
        "loaded = {'torch', 'numpy', 'sklearn', 'rich'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "manyhands.data.mnist, manyhands.data.digits\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_functions_win_over_modules_whatever_was_imported_first():
    modules = [module.name for module in pkgutil.iter_modules(manyhands.data.__path__)]
    for name in modules:
        importlib.import_module(f"manyhands.data.{name}")
    assert manyhands.data.mnist.__name__ == "mnist"
    assert manyhands.data.digits.__name__ == "digits"
    assert callable(manyhands.data.mnist)
    assert callable(manyhands.data.digits)
    assert not set(modules) & set(manyhands.data.__all__)


def test_all_names_resolve_and_are_listed():
    assert dir(manyhands.data) == sorted(manyhands.data.__all__)
    for name in manyhands.data.__all__:
        assert getattr(manyhands.data, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'cifar'"):
        _ = manyhands.data.cifar
