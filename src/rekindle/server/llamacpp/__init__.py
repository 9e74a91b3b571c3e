"""The endpoints of llama.cpp's server that are not OpenAI's: /completion, /infill, /props, /slots, /apply-template."""
