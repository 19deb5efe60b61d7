import torch

from lightning_ups.optim import MasteredOptimizer, MasterWeights, go_by_the_name_of


def test_one_class_for_each_name_which_is_still_ours():
    made = []
    for kind in (torch.optim.AdamW, torch.optim.AdamW, torch.optim.SGD):
        model = torch.nn.Linear(2, 2)
        known = kind(model.parameters(), lr=0.1)
        made.append(MasteredOptimizer(known, MasterWeights(model, dtype=torch.bfloat16)))
        go_by_the_name_of(known, made[-1])
    assert [type(ours).__name__ for ours in made] == ["AdamW", "AdamW", "SGD"]
    assert type(made[0]) is type(made[1])
    assert all(isinstance(ours, MasteredOptimizer) for ours in made)
