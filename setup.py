"""Builds the C core as one abi3 extension; everything else is in pyproject.toml."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class Abi3Wheel(bdist_wheel):
    """The extension uses the limited API of 3.10, so one wheel serves every later CPython."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return ("cp310", "abi3", platform) if python.startswith("cp") else (python, abi, platform)


setup(cffi_modules=["csrc/build.py:ffi"], cmdclass={"bdist_wheel": Abi3Wheel})
