# python trl_sft_vlm.py --dataset_name HuggingFaceH4/llava-instruct-mix-vsft --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct …
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.max_length = None  # image tokens must not be cut

    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming)

    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
