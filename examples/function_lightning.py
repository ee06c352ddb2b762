"""Lightning from a plain function: its own environment plugin (torchrun's) knows the ranks; it starts no process.

python examples/function_lightning.py
"""

import infini_run as ir


def train(epochs: int) -> float:
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, index):
            (x,) = batch
            loss = torch.nn.functional.mse_loss(self.layer(x), x.sum(dim=1, keepdim=True))
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(256, 8)), batch_size=32)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader)
    return trainer.callback_metrics["loss"].item()


result = ir.Launcher(nproc_per_node=2).run(train, 3)
print(f"loss {result.rank(0):.3f}")
