/* This header precedes the toolkit's <cuda.h> on the include path, so that gorgonia.org/cu compiles with CUDA 13.
 *
 * CUDA 13 gave eight driver functions new signatures, but gorgonia.org/cu v0.9.6 still calls them with the old ones.
 * NVIDIA's driver still exports the old functions under their old symbols; only their declarations are gone. This header
 * declares them again and makes the names refer to them. With older toolkits it adds nothing.
 */
#ifndef KASMINA_CUDA_SHIM_H
#define KASMINA_CUDA_SHIM_H

#include_next <cuda.h>

#if CUDA_VERSION >= 13000

#ifdef __cplusplus
extern "C" {
#endif

#undef cuCtxCreate
#define cuCtxCreate cuCtxCreate_v2
#undef cuMemAdvise
#undef cuMemPrefetchAsync
#undef cuGraphAddDependencies
#undef cuGraphRemoveDependencies
#undef cuGraphGetEdges
#undef cuGraphNodeGetDependencies
#undef cuGraphNodeGetDependentNodes

CUresult CUDAAPI cuCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice device);
CUresult CUDAAPI cuMemAdvise(CUdeviceptr at, size_t bytes, CUmem_advise advice, CUdevice device);
CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr at, size_t bytes, CUdevice device, CUstream stream);
CUresult CUDAAPI cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count);
CUresult CUDAAPI cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count);
CUresult CUDAAPI cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count);
CUresult CUDAAPI cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *dependencies, size_t *count);
CUresult CUDAAPI cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode *dependents, size_t *count);

#ifdef __cplusplus
}
#endif

#endif /* CUDA_VERSION >= 13000 */

#endif /* KASMINA_CUDA_SHIM_H */
