"""Shortened tracebacks of older versions and other forms, with the thread that shows them: the frames that matter."""

from __future__ import annotations

from typing import Final

_TOP: Final = "Traceback (most recent call last):\n"
_TRAIN: Final = (
    '  File "/x/site-packages/transformers/trainer.py", line 3318, in training_step\n'
    "    loss = self.compute_loss(model, inputs)\n"
)
_FORWARD: Final = (
    '  File "/x/site-packages/torch/nn/modules/module.py", line 1541, in _call_impl\n    return forward_call(*args)\n'
)
_LLAMA: Final = '  File "/x/site-packages/transformers/models/llama/modeling_llama.py", line '

OLDER: Final[dict[str, tuple[str, str, str | None]]] = {
    # transformers 4.40
    "logits": (_TOP + _TRAIN + _FORWARD + _LLAMA + "1178, in forward\n    logits = logits.float()\n", "logits", None),
    "shifted": (_TOP + _TRAIN + _LLAMA + "1184, in forward\n    shift_logits = logits[..., :-1, :].contiguous()\n",
                "logits", None),
    # transformers 4.30
    "softmax": (
        _TOP + _TRAIN + _LLAMA + "226, in forward\n    attn_weights = nn.functional.softmax(attn_weights, dim=-1, "
        "dtype=torch.float32).to(query_states.dtype)\n", "attention", None,
    ),
    # torch 1.13, `step` itself makes the states
    "torch 1": (
        _TOP + '  File "/x/site-packages/torch/optim/adamw.py", line 134, in step\n    state["exp_avg"] = '
        "torch.zeros_like(p, memory_format=torch.preserve_format)\n", "optimizer states", "PyTorch",
    ),
    "apex": (
        _TOP + '  File "/x/site-packages/apex/optimizers/fused_adam.py", line 121, in step\n    state["exp_avg"] = '
        "torch.zeros_like(p.data)\n", "optimizer states", None,
    ),
    "deepspeed": (
        _TOP + '  File "/x/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", line 532, in __init__\n'
        "    self.initialize_optimizer_states()\n"
        '  File "/x/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", line 661, in initialize_optimizer_states\n'
        "    single_grad_partition = torch.zeros(int(self.partition_size[i]),\n", "optimizer states", "DeepSpeed",
    ),
    "zero-3 save": (
        _TOP + '  File "/x/site-packages/transformers/trainer.py", line 2830, in save_model\n'
        "    self.model_wrapped.save_16bit_model(output_dir)\n"
        '  File "/x/site-packages/deepspeed/runtime/engine.py", line 3500, in _zero3_consolidated_16bit_state_dict\n'
        "    get_layer_state_dict(self.module, prefix='')\n", "gathered weights", "DeepSpeed",
    ),
    # github.com/zjunlp/KnowUnDo/issues/1
    "merge": (
        _TOP + '  File "/x/site-packages/peft/tuners/lora/model.py", line 784, in merge_and_unload\n    return '
        'self._unload_and_optionally_merge(\n  File "/x/site-packages/peft/tuners/lora/layer.py", line 415, in merge\n'
        "    base_layer.weight.data = base_layer.weight.data + delta_weight\n", "merged adapters", "PEFT",
    ),
    "merge of unsloth": (
        _TOP + '  File "/x/site-packages/unsloth/save.py", line 2364, in unsloth_generic_save_pretrained_merged\n'
        '    unsloth_generic_save(**arguments)\n  File "/x/site-packages/unsloth/save.py", line 195, in _merge_lora\n'
        "    W = fast_dequantize(W, state)\n", "merged adapters", "Unsloth",
    ),
    # github.com/huggingface/transformers/issues/17089
    "evaluation": (
        _TOP + '  File "/venv/lib/python3.7/site-packages/transformers/trainer.py", line 2515, in evaluation_loop\n'
        "    preds_host = logits if preds_host is None else nested_concat(preds_host, logits, padding_index=-100)\n"
        '  File "/venv/lib/python3.7/site-packages/transformers/trainer_pt_utils.py", line 97, in <genexpr>\n'
        "    return type(tensors)(nested_concat(t, n, padding_index=padding_index) for t, n in zip(tensors, new))\n",
        "predictions of an evaluation", None,
    ),
    # github.com/modelscope/ms-swift/issues/3399
    "gathering": (
        _TOP + '  File "/x/site-packages/transformers/trainer.py", line 4327, in evaluation_loop\n'
        "    logits = self.accelerator.pad_across_processes(logits, dim=1, pad_index=-100)\n"
        '  File "/x/site-packages/accelerate/utils/operations.py", line 670, in _pad_across_processes\n'
        "    new_tensor = tensor.new_zeros(tuple(new_size)) + pad_index\n", "predictions of an evaluation", None,
    ),
    # IPython 7: github.com/MAGICS-LAB/DNABERT_2/issues/134
    "notebook, older": (
        "OutOfMemoryError                          Traceback (most recent call last)\n"
        "/x/dist-packages/transformers/trainer.py in evaluation_loop(self, dataloader, description)\n"
        "   3138                 if self.preprocess_logits_for_metrics is not None:\n"
        "-> 3140                 preds_host = logits if preds_host is None else nested_concat(preds_host, logits)\n"
        "   3141             self.control = self.callback_handler.on_prediction_step(args, self.state)\n",
        "predictions of an evaluation", None,
    ),
    # IPython 8: github.com/bitsandbytes-foundation/bitsandbytes/issues/340
    "notebook": (
        "OutOfMemoryError                          Traceback (most recent call last)\nCell In[9], line 22\n"
        "---> 22 trainer.train()\n\n"
        "File ~/x/site-packages/bitsandbytes/optim/optimizer.py:261, in Optimizer8bit.step(self, closure)\n"
        "    259 state = self.state[p]\n--> 261 self.init_state(group, p, gindex, pindex)\n\n"
        "File ~/x/site-packages/bitsandbytes/optim/optimizer.py:410, in Optimizer2State.init_state(self, group, p)\n"
        '--> 410     state["state1"] = self.get_state_buffer(p, dtype=torch.uint8)\n',
        "optimizer states", "bitsandbytes",
    ),
}  # fmt: skip
"""By name: the traceback, what was being made, and whose it is."""

PLAIN: Final = _TOP + _TRAIN + _FORWARD + _LLAMA + "311, in forward\n    hidden_states = self.mlp(hidden_states)\n"
"""Nothing of the kind: an MLP."""

LAYER: Final = (
    _TOP + _TRAIN + '  File "/x/site-packages/torch/utils/checkpoint.py", line 314, in forward\n'
    "    outputs = run_function(*args)\n" + _LLAMA + "311, in forward\n    hidden_states = self.mlp(hidden_states)\n"
)
"""The same in a layer that is checkpointed."""
