// Decode attention with an f32 KV cache.
#define KV_F32
#include "attention.cu"
