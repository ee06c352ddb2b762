"""DistributedDataParallel from a plain function: no script to launch, and the losses come back.

python examples/function_ddp.py
"""

import infini_run as ir


def train(steps: int) -> list[float]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    worker = ir.this_worker()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(worker.rank))
    y = x.sum(dim=1, keepdim=True)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        worker.progress(step + 1, steps)
    return losses


result = ir.Launcher(nproc_per_node=2, backend="gloo", progress=True).run(train, 50)
for rank, losses in enumerate(result):
    print(f"rank {rank}: {losses[0]:.3f} to {losses[-1]:.3f}")
print(f"loss {max(losses[-1] for losses in result):.3f}")
