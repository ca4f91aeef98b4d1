"""An audit of a model behind a server, from end to end: `run_server_audit` does everything, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path

from hfpar.audit.answering import judge_answers, with_own_answer
from hfpar.audit.answers import gold_answer
from hfpar.audit.build import build_report, notes, publish
from hfpar.audit.endings import CommonEndings
from hfpar.audit.folder import AuditFolder
from hfpar.audit.prefix import TokenizedText
from hfpar.audit.probe import PlannedItem, ProbeSettings
from hfpar.audit.ranks import Say, collect, progress
from hfpar.audit.results import ItemResult, ModelInfo, Report, Timing
from hfpar.audit.server import CompletionServer, ServerAbilities
from hfpar.audit.server_http import ServerError
from hfpar.audit.server_items import CutRules, Probed, ServerProbe
from hfpar.audit.sets import AuditSet, limits_of, load_sets, ratios_of
from hfpar.audit.store import LineStore
from hfpar.config.audit_schema import AuditConfig
from hfpar.errors import ConfigError
from hfpar.parallel.layout import Layout
from hfpar.train.quiet import quiet_libraries

_SERVER = (
    "The model is behind a server: that it is the one which its name says, in which precision it is held, and that "
    "nothing stands between it and the audit can't be checked."
)
_HIDDEN = (
    "The server gives no log-probabilities of a given text, so that everything was found by generation: lengths of "
    "texts, tails, matches and runs are in words, runs of first choices are known only from the cuts on (longer ones "
    "may be missed), and there are no log-probability scores."
)


def run_server_audit(config: AuditConfig, world_size: int = 1) -> Report:
    """Audit one model behind a server.

    Args:
        config: the audit's.
        world_size: of the launch, which must be 1.

    Raises:
        HfparError: anything that the user can mend; what was finished is kept.
    """
    begin = time.monotonic()
    if world_size > 1:
        raise ConfigError(
            f"backend: openai with {world_size} processes; the server does the work, so start one: python "
            "eval/contamination.py ..."
        )
    quiet_libraries(is_main=True)
    say, alone = Say(is_main=True), Layout(0, 1)
    sets = load_sets(config)
    with ExitStack() as stack:
        server = stack.enter_context(closing(connect(config)))
        abilities = server.check()
        say(_introduction(config, server, abilities))
        warnings = [*abilities.warnings, *_fallback(config, abilities)]
        for warning in warnings:
            say(f"note: {warning}")
        folder = AuditFolder(config, _identity(config, abilities, sets), alone)
        stack.callback(folder.release)
        store = LineStore(folder.path, "items")
        planned = plan_texts(sets)
        done = set(store.collect())
        auditor = _Auditor(config, sets, server, abilities, store)
        probe_begin = time.monotonic()
        auditor([item for item in planned if item.key not in done])
        seconds = time.monotonic() - probe_begin

        items = collect(store, planned, alone)
        report = build_report(
            config,
            sets,
            items,
            model=_model_info(config, abilities),
            reference_model=None,
            orders=[],
            timing=Timing(time.monotonic() - begin, seconds, auditor.num_tokens, 1),
            warnings=[*warnings, *auditor.warnings(), *notes(len(planned), len(done), _too_long(items))],
        )
        report = replace(
            report,
            method=config.method if abilities.scores else "generate",
            limitations=[*report.limitations, _SERVER, *([] if abilities.scores else [_HIDDEN])],
        )
        publish(folder.path, report, items, sets)
    return report


def connect(config: AuditConfig) -> CompletionServer:
    """The server that the config names; nothing is sent yet.

    Raises:
        ConfigError: no such key file, or an address that is none.
    """
    assert config.base_url is not None and config.model_name_or_path is not None
    return CompletionServer(
        config.base_url,
        config.model_name_or_path,
        api_key=None if config.api_key_file is None else read_key(config.api_key_file),
        timeout=config.request_timeout,
        concurrency=config.request_concurrency,
    )


def read_key(path: str) -> str:
    """The key in a file.

    Raises:
        ConfigError: it can't be read, or is empty.
    """
    try:
        key = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"api_key_file: {path} can't be read ({reason})") from error
    if not key:
        raise ConfigError(f"api_key_file: {path} is empty; put the server's key into it")
    return key


def plan_texts(sets: Sequence[AuditSet]) -> list[PlannedItem]:
    """Every text, not yet cut: where its tokens lie the server says."""
    return [
        PlannedItem(one.name, item, TokenizedText(item.question.strip(), [], [], 0), [])
        for one in sets
        for item in one.benchmark.items
    ]


class _Auditor:
    """Probes items, several at a time, and keeps each as soon as it is done."""

    def __init__(
        self,
        config: AuditConfig,
        sets: Sequence[AuditSet],
        server: CompletionServer,
        abilities: ServerAbilities,
        store: LineStore,
    ) -> None:
        self.config, self.server, self.store = config, server, store
        self.kinds = {one.name: one.benchmark.answer_kind for one in sets}
        self.probe = ServerProbe(
            server,
            ProbeSettings(
                method=config.method,
                generate=config.generate,
                max_new_tokens=config.max_new_tokens,
                tie_tolerance=config.tie_tolerance,
            ),
            CutRules(
                ratios_of(config),
                limits_of(config),
                CommonEndings((one.info, one.benchmark) for one in sets),
            ),
            scores=abilities.scores,
        )
        self.num_tokens = 0
        self._num_done = 0
        self._misspelt: list[str] = []
        self._lock = threading.Lock()
        self._is_over = False

    def __call__(self, planned: Sequence[PlannedItem]) -> None:
        """Probe all of these.

        Raises:
            HfparError: the server's, or of a folder that can't be written; items that are done are kept.
        """
        try:
            with progress(len(planned), "probing", is_main=True) as advance:
                for _ in self.server.in_order(planned, lambda item: self._do(item, advance)):
                    pass
        except ServerError as error:
            raise ServerError(
                f"{error}; {self._num_done} of {len(planned)} items are done and kept, the same command goes on with "
                "the rest",
                error.status,
            ) from None
        finally:
            with self._lock:  # what is still under way comes too late
                self._is_over = True

    def warnings(self) -> list[str]:
        """What the report should say of how it went."""
        if not self._misspelt:
            return []
        return [
            f"the tokens of {len(self._misspelt)} texts couldn't be laid over them, so that these were probed by "
            f"generation, and their lengths are in words (the first: {self._misspelt[0]})"
        ]

    def _do(self, item: PlannedItem, advance: Callable[[int], object]) -> None:
        kind = self.kinds[item.set]
        ask = self.config.answers and gold_answer(item.item, kind) is not None
        probed = self.probe(item, ask=ask)
        with self._lock:  # answers are compared in another process, one at a time
            if self._is_over:
                return
            self.store.append([asdict(self._judge(item, probed))], rank=0)
            self.num_tokens += probed.result.num_tokens
            self._num_done += 1
            if probed.spelling is not None:
                self._misspelt.append(probed.spelling)
            advance(1)

    def _judge(self, item: PlannedItem, probed: Probed) -> ItemResult:
        (result,) = judge_answers([probed.result], [item], self.kinds.__getitem__)
        if probed.own_answer is not None:
            result = with_own_answer(result, item, probed.own_answer, self.kinds[item.set])
        return result


def _too_long(items: Mapping[str, Sequence[ItemResult]]) -> int:
    return sum(
        any(cut.skipped == "too_long" for cut in item.cuts) for found in items.values() for item in found
    )


# What is said of the server


def _introduction(config: AuditConfig, server: CompletionServer, abilities: ServerAbilities) -> str:
    kind = f" ({abilities.owned_by})" if abilities.owned_by else ""
    context = f", context of {abilities.context_length} tokens" if abilities.context_length else ""
    return f"{config.model_name_or_path} at {server.url}{kind}{context}"


def _fallback(config: AuditConfig, abilities: ServerAbilities) -> list[str]:
    """That the default method can't be had."""
    if abilities.scores or config.method == "generate":
        return []
    return [f"{abilities.scores_reason}: every verdict is found by generation, as with --method generate"]


def _identity(config: AuditConfig, abilities: ServerAbilities, sets: Sequence[AuditSet]) -> list[str]:
    """What decides, beside the settings, whether results can be used again: tokens and words aren't mixed."""
    unit = "tokens" if abilities.scores else "words"
    return [str(config.model_name_or_path), unit, *(one.info.sha256 for one in sets)]


def _model_info(config: AuditConfig, abilities: ServerAbilities) -> ModelInfo:
    return ModelInfo(
        name=str(config.model_name_or_path),
        architecture=f"server ({abilities.owned_by})" if abilities.owned_by else "server",
        num_parameters=None,
        dtype=None,
        sha256=None,
        tokenizer_sha256=None,
    )
