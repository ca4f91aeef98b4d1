"""An ordinary Accelerate loop whose ranks share each batch's tokens: three lines of it are hfpar's.

accelerate launch --config_file accelerate_configs/ddp.yaml examples/sequence_parallel.py MODEL TEXTS.jsonl SP_SIZE
"""

import sys

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import hfpar

model_path, data_path, sp_size = sys.argv[1:]
accelerator = Accelerator(cpu=not torch.cuda.is_available())
layout = hfpar.Layout.of_world(sp_size=int(sp_size))  # sp_size ranks share a batch; cp_size works alike

tokenizer = AutoTokenizer.from_pretrained(model_path)
texts = load_dataset("json", data_files=data_path, split="train")
rows = texts.map(lambda row: tokenizer(row["text"]), remove_columns=texts.column_names)
# Ranks that share a batch draw the same one, so the loader isn't Accelerate's to prepare.
sampler = DistributedSampler(rows, num_replicas=layout.dp_size, rank=layout.dp_rank, seed=0)
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader(rows, batch_size=8 // layout.dp_size, sampler=sampler, collate_fn=collate)

model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
hfpar.parallelize(model, layout)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

for step, batch in enumerate(loader, start=1):
    batch = {name: values.to(accelerator.device) for name, values in batch.items()}
    loss = model(**layout.shard(batch)).loss
    accelerator.backward(loss)
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(f"step {step}: loss {float(loss):.6f}, gradient norm {float(grad_norm):.6f}")
