"""The micro recipe: the smallest run that has every part, for tests and benchmarks of whole runs.

It makes a model of one layer, a warm start of four updates, four steps on `hops`, and evaluations.
"""

MICRO = """
steps = 4
groups_per_step = 4
max_tokens_per_microbatch = 2048
[model]
hidden = 32
layers = 1
threads = 1
[[env]]
name = "hops"
tasks = { count = 64, links = [1, 2] }
[rollout]
group_size = 4
max_turns = 4
max_prompt_tokens = 150
max_action_tokens = 6
max_trajectory_tokens = 160
[rollout.limits]
call_seconds = 20
[engine]
max_num_seqs = 16
[loss]
name = "ppo_clip"
anchor = "engine"
[optimizer]
learning_rate = 1e-3
[evaluation]
every = 2
tasks = 8
final_tasks = 16
[sft]
updates = 4
batch = 8
[checkpoints]
every = 2
"""
