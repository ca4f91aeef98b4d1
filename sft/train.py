"""Fine-tune a causal language model.

    accelerate launch --config_file accelerate_configs/ddp.yaml sft/train.py --config sft/configs/lora.yaml
    accelerate launch --config_file accelerate_configs/fsdp2.yaml sft/train.py \
        --model_name_or_path my-model --dataset conversations.jsonl --output_dir runs/mine

Without arguments it trains a tiny model, built on the spot, on word problems that hfpar makes up.
All settings: python sft/train.py --help
"""

import sys
from pathlib import Path

from hfpar.train.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], demo_config=Path(__file__).parent / "configs" / "demo.yaml"))
