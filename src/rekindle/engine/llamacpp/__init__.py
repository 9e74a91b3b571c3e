"""The llama.cpp engine, through its C interface. No torch, no compiler.

c_api         the functions and structs of the shared library, and which library
loaded_model  models, contexts, its log and errors
tokenizer     the vocabulary and the chat template of a GGUF file
sample        llama.cpp's own samplers
lora          LoRA adapters
state         the bytes of a sequence's state as KV, and feeds into them
kv_buffer     the buffer that all sequences share
sequence      one sequence, with KV by span, or by snapshot if the model has no plain KV
engine        all of it as an `Engine`
"""
