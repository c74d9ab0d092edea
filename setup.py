"""Packaging: the top-level folders ``passes`` and ``kernels`` install as sub-packages of ``heterps_compile``."""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = {
    "heterps_compile": "heterps_compile",
    "heterps_compile.passes": "passes",
    "heterps_compile.kernels": "kernels",
}
DATA_FILES = ["py.typed", "*.yaml", "*.json", "*.html", "*.cpp", "*.h"]

packages = [
    name for root, folder in FOLDERS.items() for name in [root, *(f"{root}.{child}" for child in find_packages(folder))]
]

setup(
    name="heterps-compile",
    version="0.1.0",
    description="A torch.compile backend that places layers on types of CPU and GPU for the least money",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    license="Apache-2.0",
    packages=packages,
    package_dir=FOLDERS,
    package_data={"": DATA_FILES},
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; platform_system == 'Linux'",
        "numpy",
        "networkx",
        "pyyaml",
        "tqdm",
    ],
    extras_require={
        "data": ["pandas", "pyarrow"],
        "bayesian": ["scikit-learn"],  # the policy of that name
        "optimum": ["scipy"],  # proven bounds for plans with limits or shared tables
        "test": [
            "pytest",
            "pytest-cov",
            "hypothesis",
            "setuptools>=77",
            "scipy",
            "pandas",
            "pyarrow",
            "scikit-learn",
            "requests",
        ],
        "lint": ["ruff==0.17.6", "mypy==2.4.1", "types-PyYAML", "types-tqdm"],
    },
    entry_points={
        "console_scripts": ["heterps = heterps_compile.cli:main"],
        "torch_dynamo_backends": ["heterps = heterps_compile.backend:heterps"],
    },
)
