// Decode attention on tensor cores with a KV cache of bytes with scales.
#define KV_Q8
#include "decode_attention_mma.cu"
