"""The recipes of the guide that report progress from trainers, each in a real training of two ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import pytest

from tests.support.blocks import blocks
from tests.support.paths import ROOT

IS_MISSING = importlib.util.find_spec("torch") is None and os.environ.get("TEST_TORCH") != "required"
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.xdist_group("torch"),
    pytest.mark.skipif(IS_MISSING, reason="torch is not installed: make torch"),
]
STEPS = 4
DATA = f"""
import torch
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn({STEPS * 16}, 8), torch.randn({STEPS * 16}, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
"""
TRAININGS = {
    "import lightning": """
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=callbacks, **quiet
)
trainer.fit(Model(), loader)
""",
    "TrainerCallback": """
import tempfile
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (64, 16))]
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=8, save_strategy="no",
        logging_strategy="no", ddp_find_unused_parameters=False, report_to="none", disable_tqdm=True,
    )
    Trainer(model, args, train_dataset=rows, callbacks=callbacks).train()
""",
    "accelerator": """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
layer = torch.nn.Linear(8, 1)
train(accelerator, *accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.01), loader))
accelerator.free_memory()  # a model that holds the process group at the exit sometimes aborts it, with torchrun too
accelerator.end_training()
""",
}
RECIPES = {block.name: block for block in blocks(ROOT / "docs/restarts.md") if "recipes" in str(block.said)}


def test_page_has_recipe_for_each_training():
    assert len(RECIPES) == len(TRAININGS)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_reports_each_step_of_each_rank(infini_run, tmp_path, name):
    recipe = RECIPES[name].text
    training = next(text for word, text in TRAININGS.items() if word in recipe)
    (tmp_path / "train.py").write_text(f"{recipe}\nSTEPS = {STEPS}\n{DATA}{training}")
    flags = ("--standalone", "--nproc_per_node=2", "--console=none", f"--report={tmp_path}/report")
    command = infini_run(*flags, sys.executable, tmp_path / "train.py", env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert command.wait() == 0, command.err
    report = json.loads((tmp_path / "report").read_text())
    assert [rank["progress"] for rank in report["ranks"]] == [STEPS, STEPS]
