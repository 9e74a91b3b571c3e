"""The ONNX Runtime engine: decoders as graphs, without torch.

onnx_options      what can be set, without importing the library
kv_buffers        keys and values of sequences, in memory that the graph reads and writes
graph_runner      the library's session: providers, bindings, runs that can be stopped
onnx_sequence     one sequence
folder_tokenizer  the tokenizer and chat template of a folder
onnx_engine       all of it as an `Engine`
export            making the graph of a model that came in another form
"""
