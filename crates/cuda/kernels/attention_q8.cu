// Decode attention with a quantised KV cache: bytes with scales.
#define KV_Q8
#include "attention.cu"
