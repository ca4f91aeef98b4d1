"""Find out which items of a benchmark a checkpoint has seen.

    python eval/contamination.py --model_name_or_path my-model --benchmarks math500,gsm8k
    accelerate launch --config_file accelerate_configs/ddp.yaml eval/contamination.py --model_name_or_path my-model

All settings: python eval/contamination.py --help
"""

import sys

from hfpar.audit.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
