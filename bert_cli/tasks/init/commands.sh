# sentences, vocabulary and records
{% for part in ("train", "held_out") %}
bert preprocess {{ out }}/text/{{ part }}.jsonl {{ out }}/sentences/{{ part }} --language {{ language }}
{% endfor %}
{% set cased = " --cased" if start and start.is_cased else "" %}
{% if chosen.new_pieces %}
bert vocab {{ out }}/sentences/train {{ out }}/vocab{{ cased }} --extend {{ vocabulary }} --size +{{ chosen.new_pieces }}
{% elif not start %}
bert vocab {{ out }}/sentences/train {{ out }}/vocab --size {{ chosen.model.vocab_size }}{{ "" if language == "en" else " --no-strip-accents" }}
{% endif %}
{% set used = vocabulary if start and not chosen.new_pieces else out ~ "/vocab" %}
{% for part in ("train", "held_out") %}
bert tokenize {{ out }}/sentences/{{ part }} {{ out }}/records/{{ part }} --vocab {{ used }} --sequence-length {{ chosen.config.max_seq_length }} --mask-tokens {{ chosen.config.max_predictions_per_seq }}{{ cased }} --masking dynamic --no-nsp
{% endfor %}
# training; a run that was stopped continues with the same command
bert doctor pretrain --config {{ out }}/pretrain.json
bert pretrain --config {{ out }}/pretrain.json
{% if goal == "labels" %}
# with your labels.csv, a table with the columns text and label
bert classify --pretrained-ckpt-path {{ out }}/run --save-ckpt-path {{ out }}/classifier --train-file labels.csv --optimizer-opts.learning-rate.max-learning-rate {{ rate }}
{% else %}
# a mask in held-out text
bert predict {{ out }}/run {{ masked }}
{% endif %}
# is the model better than its start?
bert verdict {{ out }}
