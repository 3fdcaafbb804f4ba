"""Train a tiny BERT by the Trainer of transformers over the backend `hpcdist`; ranks must end with equal weights.

RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are those that accelerate reads; `make frameworks` sets them.
"""

import sys

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.training_args import ParallelMode

import hpcdist.torch_backend

dist.init_process_group("hpcdist", init_method="hpcdist://")
torch.manual_seed(1)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))
rows = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(number % 2)} for number in range(64)]
before = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
given = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=8,
    num_train_epochs=2,
    report_to=[],
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
)
result = Trainer(model=model, args=given, train_dataset=rows).train()
assert dist.get_backend() == "hpcdist"
assert given.parallel_mode is ParallelMode.DISTRIBUTED
assert result.global_step == 2 * 64 // 8 // dist.get_world_size(), "each rank has its part of the rows"
own = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
assert not torch.equal(own, before)
found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
dist.all_gather(found, own)
assert all(torch.equal(peer_weights, own) for peer_weights in found)
print(f"rank {dist.get_rank()}: trained by transformers over hpcdist {hpcdist.__version__}", flush=True)
