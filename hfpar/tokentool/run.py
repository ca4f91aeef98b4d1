"""What `hfpar tokens` does, in order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hfpar.errors import ConfigError
from hfpar.tokentool.choose import choose_tokens
from hfpar.tokentool.compare import Comparison, compare
from hfpar.tokentool.measure import Model, find_neighbors, find_tokens, measure
from hfpar.tokentool.source import SourceOptions, TokenSource, open_source


@dataclass(frozen=True)
class Request:
    """A command line.

    Attributes:
        model: folder or hub id.
        other: of the model beside it; None: there is none.
        base: of an adapter, if not where it says.
        chat_template: in place of the models' own.
        trust_remote_code: whether a model's code may run.
        num_neighbors: of a token.
        all_tokens: list every special and added token.
    """

    model: str
    other: str | None = None
    base: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False
    num_neighbors: int = 3
    all_tokens: bool = False


@dataclass(frozen=True, eq=False)
class Findings:
    """What was found.

    Attributes:
        models: one, or two to compare.
        listed: texts of the tokens to show, in this order.
        num_left_out: special and added tokens that aren't shown.
        comparison: of two models.
    """

    models: list[Model]
    listed: list[str]
    num_left_out: int
    comparison: Comparison | None


def run_tokens(request: Request, *, as_json: bool, plot: Path | None) -> int:
    """Measure one model or two, and print and draw what was found.

    Returns:
        0.

    Raises:
        ConfigError: a model or a file that can't be.
    """
    shows_neighbors = as_json or request.other is None  # they have no room in the table of two models
    findings = find(request if shows_neighbors else replace(request, num_neighbors=0))
    if as_json:
        from hfpar.tokentool.json_report import to_json

        sys.stdout.write(to_json(findings, request) + "\n")
    else:
        from hfpar.tokentool.report import print_report

        print_report(findings)
    if plot is not None:
        from hfpar.tokentool.plot import plot_norms

        plot_norms(findings, plot)
    return 0


def find(request: Request) -> Findings:
    """Measure one model or two.

    Raises:
        ConfigError: a model that can't be read, or two without a common token.
    """
    options = SourceOptions(request.base, request.chat_template, request.trust_remote_code)
    names = {"MODEL": request.model} | ({"--compare": request.other} if request.other is not None else {})
    with ExitStack() as stack:
        sources: list[TokenSource] = []
        for key, name in names.items():
            with _about(key):
                sources.append(stack.enter_context(open_source(name, options)))
        texts = {token.text for source in sources for token in find_tokens(source, set()).values()}
        models = []
        for key, source in zip(names, sources, strict=True):
            with _about(key):
                models.append(measure(source, texts))
        comparison = compare(*models) if len(models) == 2 else None
        listed, num_left_out = choose_tokens(models, all_tokens=request.all_tokens)
        for model in models:
            ids = [token.id for token in model.tokens.values() if token.text in set(listed)]
            model.neighbors.update(find_neighbors(model, ids, request.num_neighbors))
    return Findings(models, listed, num_left_out, comparison)


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Let an error begin with the argument that it is about."""
    try:
        yield
    except ConfigError as error:
        reason = str(error).removeprefix("model_name_or_path: ")
        raise ConfigError(reason if reason.startswith("chat_template") else f"{key}: {reason}") from error
