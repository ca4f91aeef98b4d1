"""Draw data_show.svg: what `hfpar data show` prints for a made-up conversation.

python docs/images/data_show.py
"""

import io
import json
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console

from hfpar.config.schema import SFTConfig
from hfpar.datatool.show import run_show
from hfpar.models.tiny import build_tiny_model

CALL = {"function": {"name": "departures", "arguments": {"station": "Hamar", "to": "Oslo"}}}
ROW = {
    "tools": [{"name": "departures", "parameters": {"station": "string", "to": "string"}}],
    "messages": [
        {"role": "system", "content": "You know the timetable of a small railway."},
        {"role": "user", "content": "When does the next train leave for Oslo?"},
        {"role": "assistant", "reasoning_content": "I have to look that up.", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"times": ["14:05", "16:05"], "platform": 2}'},
        {"role": "assistant", "content": "At 14:05, from platform 2. The one after it leaves at 16:05."},
        {"role": "user", "content": "Takk!"},
        {"role": "assistant", "content": "Vær så god, and have a good journey."},
    ],
}


def main() -> None:
    """Write the picture beside this file."""
    target = Path(__file__).resolve().with_suffix(".svg")
    console = Console(
        record=True,
        file=io.StringIO(),
        width=112,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_model(Path(folder, "model"), hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        os.chdir(folder)
        Path("trains.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
        config = SFTConfig(model_name_or_path="model", dataset="trains.jsonl", chat_template="chatml")
        run_show(config, index=0, line=None, ids=False, console=console)
    svg = console.export_svg(title="hfpar data show trains.jsonl --index 0", unique_id="show")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # nothing to be fetched
    svg = svg.replace("Fira Code, monospace", "Menlo, Consolas, DejaVu Sans Mono, monospace")
    target.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
