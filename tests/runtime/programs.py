"""Programs that the runtime tests run as children."""

TRAIN = """
    import hashlib, sys, threading, torch
    import hydroslurm

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    run_dir = sys.argv[1] if len(sys.argv) > 1 else None
    engine = hydroslurm.od_execution_wrapper(model, run_dir=run_dir)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.05, momentum=0.9)
    data = torch.randn(256, 64)
    print("ready", hydroslurm.controller().gate.name)
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else 10**9
    step = 0

    def listen():  # a line ends the training some steps later
        global limit
        if sys.stdin.readline():
            limit = step + 100

    threading.Thread(target=listen, daemon=True).start()
    while step < limit:
        optimizer.zero_grad()
        engine(data).square().mean().backward()
        optimizer.step()
        step += 1
        hydroslurm.set_step(step)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in engine.parameters()))
    print("steps", step)
    print("hash", digest.hexdigest())
"""
