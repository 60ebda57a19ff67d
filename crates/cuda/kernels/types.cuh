// Integer types, the element type of the KV cache, and attributes that all kernels use.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void

// The KV cache holds f16 elements, unless a translation unit selects f32, or bytes with f16 scales.
#ifdef KV_F32
typedef float KvElement;
#elif defined(KV_Q8)
typedef u8 KvElement;
#else
typedef u16 KvElement;
#endif
