package cpu

// Embedding copies row ids[r] of the table, which has d features, to row r of y.
func Embedding[T Float](y []T, ids []int, table []T, d int) {
	Parallel(len(ids), grain(d), func(lo, hi int) {
		for r := lo; r < hi; r++ {
			copy(y[r*d:][:d], table[ids[r]*d:])
		}
	})
}

// EmbeddingBackward computes the gradient of the table, dt[v] = Σ_{r: ids[r] = v} g[r]. Rows are added in order.
func EmbeddingBackward[T Float](dt []T, ids []int, g []T, d int) {
	Parallel(len(dt), 1<<16, func(lo, hi int) { clear(dt[lo:hi]) })
	Parallel(d, max(16, grain(len(ids))), func(lo, hi int) {
		for r, id := range ids {
			dst, src := dt[id*d+lo:id*d+hi], g[r*d+lo:r*d+hi]
			for i, v := range src {
				dst[i] += v
			}
		}
	})
}
