"""The settings file that `paceline init` writes."""

TEMPLATE = """\
# A training by paceline.  Run it:
#   paceline train settings.toml                       on this machine
#   paceline train settings.toml --workers 4           the same with four workers, without other changes
#   paceline simulate settings.toml --workers 16       on a simulated cluster
#   torchrun --nproc-per-node 2 -m paceline.cli train settings.toml      as ranks of a job
# Any key can be given as a flag.  `paceline schema` prints a JSON schema for editors.

epochs = 15         # or steps = 1000
workers = 2
seed = 0

[model]
name = "perceptron"             # or "my_models:build": a function that returns a torch.nn.Module
hidden = [256]                  # other keys are arguments of the function

[data]
name = "digits"                 # or "fashion-mnist", or "my_data:load": (inputs, targets, test inputs, test targets)
batch = 32                      # samples of a step ...
batch-of = "worker"             # ... of each worker; "all": of all workers together
# In place of batch: larger minibatches are tried now and then, and kept if they do no harm; or they grow.
# auto = { start = 32, multiple = 8, every = 3 }
# grow = { start = 8, end = 64, epochs = 3 }

[loss]
name = "cross-entropy"          # or "squared-error", or "my_loss:f": a function of the model and a minibatch

[optimizer]
name = "sgd"                    # any of torch.optim, "lars", "lamb", "two-stage", or "my_optimizers:Class"
lr = 0.05                       # or lr-per-sample
momentum = 0.9                  # or momentum-time-constant, in samples

[scaling]                       # lr and momentum are for steps of `base` samples; other steps scale them
# base = 32                     # by default the batch of one worker

[schedule]
warmup = "1 epoch"              # lengths are in steps, samples or epochs
start = "base"                  # the warm-up starts at the rate of one worker
decay = "cosine"                # "constant", "polynomial", "cosine", "multistep", "exponential"

[strategy]
name = "block-momentum"         # `paceline strategies` lists them, with their settings
period = 8                      # steps between averages; or samples = 256, of each worker
# codec = "one-bit"             # `paceline codecs` lists them

# [warm-start]                  # another method first; by default all workers do the same work
# length = "1 epoch"

# [adjust]                      # go back to the best model, and lower the rate, when the training loss rises
# interval = 1                  # epochs

[evaluation]
every = "1 epoch"
metrics = ["accuracy", "loss"]

[log]
progress = true
# metrics = "metrics.jsonl"     # a line for each record
# tensorboard = "runs/first"
# statistics = 20               # every so many syncs, where the time went

[save]
model = "model.safetensors"     # one worker writes it at the end

# [checkpoint]                  # `paceline train` continues from the newest one in the folder
# folder = "checkpoints"
# every = "10min"               # or "500 steps", "1 epoch"

[cluster]                       # for `paceline simulate`
compute = "20ms"                # of a worker's gradient
bandwidth = "100Mbit/s"
latency = "5ms"
"""
