"""What every process of these tests needs, loaded once: they are forked from one that has it."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402, F401
import peft  # noqa: E402, F401

import hfpar.train.export  # noqa: E402, F401
import hfpar.train.loop  # noqa: E402, F401
import hfpar.train.model  # noqa: E402, F401
import hfpar.train.optim  # noqa: E402, F401
