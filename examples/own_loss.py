"""Train on rows made here, with an own loss, and watch it: `python examples/own_loss.py`."""

import finetune

rows = [{"prompt": f"What is {a} plus {b}?", "completion": f" {a + b}"} for a in range(20) for b in range(20)]


def focal(model, batch):
    """Focal loss (arXiv 1708.02002): tokens that the model already knows count for little."""
    scores = model(**batch, fused_lm_head=True)
    weights = (1 - scores.log_probs.exp()) ** 2
    return -(weights * scores.log_probs).sum(), scores.label_mask.sum()


class Watch(finetune.Callback):
    def on_step(self, metrics):
        print(f"step {metrics['step']}: {metrics['loss']:.3f}")


job = {"objective": focal, "max_steps": 12, "learning_rate": 3e-3, "precision": "fp32"}
result = finetune.train(
    model="builtin:tiny-llama", data=rows, training=job, callbacks=[Watch()], output={"dir": "runs/sums"}
)
print(f"eval loss {result.evaluations[0]['eval_loss']:.2f} → {result.evaluations[-1]['eval_loss']:.2f}")
