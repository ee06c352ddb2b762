"""Accelerate from a plain function: it finds the ranks in the environment, as under any launcher.

python examples/function_accelerate.py
"""

import infini_run as ir


def train(epochs: int) -> float:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=32))
    loss = torch.zeros(())
    for _ in range(epochs):
        for batch, target in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), target)
            accelerator.backward(loss)
            optimizer.step()
    total = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.end_training()
    return total


result = ir.Launcher(nproc_per_node=2, env={"ACCELERATE_USE_CPU": "1"}).run(train, 5)
print(f"loss {result.rank(0):.3f}")
