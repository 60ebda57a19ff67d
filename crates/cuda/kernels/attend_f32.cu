// Attention whose keys and values are kept in f32.
#define KV_F32
#include "attend.cu"
