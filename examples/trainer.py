"""transformers' Trainer on a tiny Llama of random weights: it learns to count.

    infini-run --standalone --nproc_per_node=2 examples/trainer.py

Trainer finds the ranks in the environment, and each takes its share of every batch. A sequence counts up from a
number of its own, modulo VOCABULARY. Nothing is downloaded: model and data are made here. On CPUs, or without use_cpu
on GPUs. Fails if the loss on sequences that it has not seen stays above TARGET.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCABULARY = 32
LENGTH = 16
TARGET = 0.5


def make_sequences(count):
    starts = torch.randint(VOCABULARY, (count, 1))
    tokens = (starts + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def main():
    set_seed(0)
    torch.set_num_threads(1)  # a model this small gains nothing from more
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=4,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            save_strategy="no",
            logging_strategy="no",
            ddp_find_unused_parameters=False,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(make_model(), args, train_dataset=make_sequences(256), eval_dataset=make_sequences(64))
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {loss:.3f} after {trainer.state.global_step} steps of {args.world_size} ranks")
    if loss > TARGET:
        sys.exit(f"the loss is above {TARGET}")


if __name__ == "__main__":
    main()
