"""What the site needs beyond docs/: the version, the pictures of benchmarks/results, plain names for cross-references.

mkdocs serves docs/ alone. Pages link to result pictures where they lie in the repository, which is right on a code
host; here the same files join the site.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

from griffe import Docstring, Extension
from mkdocs.structure.files import File, Files

from ruda_optim import __version__

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "results"
_BETWEEN_CJK = re.compile("(?<=[\u3000-\u9fff\uff00-\uffef])\\n(?=[\u3000-\u9fff\uff00-\uffef])")
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?([^`]+)`")


def on_config(config: Any) -> Any:
    config.site_name += f" {__version__}"  # in the head of every page
    return config


def on_files(files: Files, config: Any) -> Files:
    for picture in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = _BETWEEN_CJK.sub("", markdown)  # a line's end is a space to a browser; these scripts have none
    return markdown.replace("](../benchmarks/results/", "](results/")


class PlainRoles(Extension):
    """Docstrings say :class:`name`; the site shows the name as code."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
