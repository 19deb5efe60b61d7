import sys
import time

from lightning_ups.data import PackedTokens

for packing in ("best_fit", "greedy"):
    data = PackedTokens(sys.argv[1], seq_len=2048, batch_size=16, num_workers=0, packing=packing)
    data.setup("fit")
    batches = iter(data.train_dataloader())
    next(batches)
    seconds = []
    for _ in range(30):
        start = time.process_time()
        next(batches)
        seconds.append(time.process_time() - start)
    median = sorted(seconds)[15]
    print(f"{packing}: {median * 1e3:.2f} ms of one core a batch, {16 * 2048 / median / 1e6:.0f} million tokens/s")
