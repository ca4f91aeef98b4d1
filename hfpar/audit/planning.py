"""`--plan`: what an audit would cost and could find, before anything runs."""

from __future__ import annotations

from hfpar.audit.model import ModelSettings, open_model
from hfpar.audit.plan import make_plan, plain_cut, print_plan
from hfpar.audit.prefix import Cut, TextTokenizer, find_cut
from hfpar.audit.report.terminal import default_console
from hfpar.audit.results import Mode
from hfpar.audit.sets import limits_of, load_sets, ratios_of
from hfpar.config.audit_schema import AuditConfig
from hfpar.train.quiet import quiet_libraries


def show_plan(config: AuditConfig) -> None:
    """Print it. With a model, its tokenizer counts and cuts; no weights are read.

    Raises:
        ConfigError: no such model.
        DataError: a benchmark that can't be read.
    """
    quiet_libraries(is_main=True)
    sets = [(one.info, one.benchmark) for one in load_sets(config)]
    limits = limits_of(config)
    modes: tuple[Mode, ...] = ("bare", "chat") if config.chat_template else ("bare",)
    if config.model_name_or_path is None or config.backend != "transformers":
        plan = make_plan(
            sets,
            ratios_of(config),
            lambda text, ratio: plain_cut(text, ratio, limits),
            modes=modes,
            alpha=config.alpha,
        )
        print_plan(plan, default_console())
        return
    with open_model(
        ModelSettings(config.model_name_or_path, config.base, trust_remote_code=config.trust_remote_code)
    ) as source:
        tokenizer = TextTokenizer(source.tokenizer)

    def cut_text(text: str, ratio: float) -> Cut:
        return find_cut(tokenizer([text])[0], ratio, tokenizer, limits)

    plan = make_plan(
        sets,
        ratios_of(config),
        cut_text,
        count_tokens=lambda texts: [len(one.input_ids) for one in tokenizer(texts)],
        modes=modes,
        alpha=config.alpha,
    )
    print_plan(plan, default_console())
