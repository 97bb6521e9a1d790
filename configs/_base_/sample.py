"""Settings that samplings share."""

dtype = "fp16"
batch_size = 2
seed = 42
prompt_path = "./assets/texts/t2v_samples.txt"
save_dir = "./samples"
