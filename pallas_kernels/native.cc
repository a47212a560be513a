// Decode attention over pages and the routed experts for CPUs, as calls that XLA makes (see native.py).
//
// XLA's loops run on one thread, and copy pages and experts' weights before they multiply. These read
// both where they are, on all threads of XLA's pool. A row's result depends on its own data alone: not
// on the other rows, nor on which thread computes it.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Result = ffi::ResultBuffer<ffi::F32>;

namespace {

constexpr int kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));

inline Vec Load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void Store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

inline float Sum(Vec v) {
  float part[kLanes];
  Store(part, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
}

// exp of numbers that are not above 0, to about 1e-7 of it; 0 far below; NaN of NaN. x = k ln 2 + r,
// and a polynomial in r whose coefficients are those of the Cephes library.
inline Vec Exp(Vec x) {
  const Vec low = Vec{} - 87.0f;
  const IntVec below = x < low;
  const Vec in = below ? low : x;
  const IntVec k = __builtin_convertvector(in * 1.44269504f - 0.5f, IntVec);
  const Vec whole = __builtin_convertvector(k, Vec);
  const Vec r = in - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec bits = (k + 127) << 23;
  Vec power;
  std::memcpy(&power, &bits, sizeof power);
  const Vec found = below ? Vec{} : p * power;
  return x == x ? found : x;
}

// Runs task(0) to task(n - 1) on the threads of a pool and on this one, which takes tasks, too, and so
// waits only for those that another thread has begun.
template <typename Task>
void Parallel(ffi::ThreadPool& pool, int n, Task task) {
  struct Progress {
    std::atomic<int> next{0};
    std::atomic<int> done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto progress = std::make_shared<Progress>();
  auto run = [progress, n, task] {
    int mine = 0;
    for (int i; (i = progress->next.fetch_add(1)) < n; ++mine) task(i);
    if (mine > 0 && progress->done.fetch_add(mine) + mine == n) {
      std::lock_guard<std::mutex> lock(progress->mutex);
      progress->all_done.notify_all();
    }
  };
  const int helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  for (int i = 0; i < helpers; ++i) pool.Schedule(decltype(run)(run));
  run();
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->all_done.wait(lock, [&] { return progress->done.load() == n; });
}

// -- decode attention -----------------------------------------------------------------------------

constexpr int kKeys = 64;  // that are scored at a time

struct Attention {
  const float *q, *k, *v, *sinks;
  const int32_t *table, *kv_len;
  float* out;
  int64_t first_page;
  int heads, kv_heads, head_dim, page_size, max_pages, window;
  float scale;
};

// One row and one key-value head.
void AttendHead(const Attention& a, int b, int g) {
  const int group = a.heads / a.kv_heads, dim = a.head_dim, length = a.kv_len[b];
  const int64_t row = static_cast<int64_t>(b) * a.heads + g * group;
  std::vector<float> top(a.sinks + row, a.sinks + row + group), norm(group), acc(group * dim);
  for (int h = 0; h < group; ++h) norm[h] = top[h] == -kInfinity ? 0.0f : 1.0f;
  alignas(64) float p[kKeys];
  int at = a.window > 0 ? std::max(0, length - a.window) : 0;
  while (at < length) {
    const int offset = at % a.page_size;
    const int n = std::min({kKeys, a.page_size - offset, length - at});
    const int64_t page = a.first_page + a.table[static_cast<int64_t>(b) * a.max_pages + at / a.page_size];
    const int64_t begin = ((page * a.kv_heads + g) * a.page_size + offset) * dim;
    const float *k = a.k + begin, *v = a.v + begin;
    for (int h = 0; h < group; ++h) {
      const float* q = a.q + (row + h) * dim;
      float most = top[h];
      for (int c = 0; c < n; ++c) {
        Vec sum = Load(q) * Load(k + c * dim);
        for (int d = kLanes; d < dim; d += kLanes) sum += Load(q + d) * Load(k + c * dim + d);
        p[c] = Sum(sum) * a.scale;
        most = p[c] > most ? p[c] : most;
      }
      const float pivot = most == -kInfinity ? 0.0f : most;
      for (int c = n; c % kLanes != 0; ++c) p[c] = -kInfinity;
      Vec weights{};
      for (int c = 0; c < n; c += kLanes) {
        const Vec e = Exp(Load(p + c) - pivot);
        Store(p + c, e);
        weights += e;
      }
      const float keep = std::exp(top[h] - pivot);
      norm[h] = norm[h] * keep + Sum(weights);
      top[h] = most;
      for (int d = 0; d < dim; d += kLanes) {
        Vec sum = Load(&acc[h * dim + d]) * keep;
        for (int c = 0; c < n; ++c) sum += p[c] * Load(v + c * dim + d);
        Store(&acc[h * dim + d], sum);
      }
    }
    at += n;
  }
  for (int h = 0; h < group; ++h)
    for (int d = 0; d < dim; ++d)
      a.out[(row + h) * dim + d] = acc[h * dim + d] / (norm[h] < 1e-30f ? 1e-30f : norm[h]);
}

ffi::Error Attend(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats sinks, Ints layer,
                  Ints table, Ints kv_len, float scale, int32_t window, Result out) {
  const auto pages = k.dimensions();
  const Attention a{q.typed_data(),
                    k.typed_data(),
                    v.typed_data(),
                    sinks.typed_data(),
                    table.typed_data(),
                    kv_len.typed_data(),
                    out->typed_data(),
                    *layer.typed_data() * pages[1],
                    static_cast<int>(q.dimensions()[1]),
                    static_cast<int>(pages[2]),
                    static_cast<int>(pages[4]),
                    static_cast<int>(pages[3]),
                    static_cast<int>(table.dimensions()[1]),
                    window,
                    scale};
  const int rows = static_cast<int>(q.dimensions()[0]);
  Parallel(pool, rows * a.kv_heads, [a](int i) { AttendHead(a, i / a.kv_heads, i % a.kv_heads); });
  return ffi::Error::Success();
}

// -- experts --------------------------------------------------------------------------------------

// out = x @ w of kRows rows, for w of `columns`, a multiple of the lanes. A row's sums go by falling
// row of w whatever the number of rows is.
template <int kRows>
void Product(const float* x, int64_t x_stride, const float* w, int depth, int columns, float* out,
             int64_t out_stride) {
  int n = 0;
  for (; n + 2 * kLanes <= columns; n += 2 * kLanes) {
    Vec left[kRows]{}, right[kRows]{};
    for (int k = 0; k < depth; ++k) {
      const float* from = w + static_cast<int64_t>(k) * columns + n;
      const Vec w0 = Load(from), w1 = Load(from + kLanes);
      for (int m = 0; m < kRows; ++m) {
        left[m] += x[m * x_stride + k] * w0;
        right[m] += x[m * x_stride + k] * w1;
      }
    }
    for (int m = 0; m < kRows; ++m) {
      Store(out + m * out_stride + n, left[m]);
      Store(out + m * out_stride + n + kLanes, right[m]);
    }
  }
  for (; n < columns; n += kLanes) {
    Vec sums[kRows]{};
    for (int k = 0; k < depth; ++k) {
      const Vec w0 = Load(w + static_cast<int64_t>(k) * columns + n);
      for (int m = 0; m < kRows; ++m) sums[m] += x[m * x_stride + k] * w0;
    }
    for (int m = 0; m < kRows; ++m) Store(out + m * out_stride + n, sums[m]);
  }
}

void Products(int rows, const float* x, int64_t x_stride, const float* w, int depth, int columns,
              float* out, int64_t out_stride) {
  switch (rows) {
    case 1: return Product<1>(x, x_stride, w, depth, columns, out, out_stride);
    case 2: return Product<2>(x, x_stride, w, depth, columns, out, out_stride);
    case 3: return Product<3>(x, x_stride, w, depth, columns, out, out_stride);
    case 4: return Product<4>(x, x_stride, w, depth, columns, out, out_stride);
    case 5: return Product<5>(x, x_stride, w, depth, columns, out, out_stride);
    case 6: return Product<6>(x, x_stride, w, depth, columns, out, out_stride);
    case 7: return Product<7>(x, x_stride, w, depth, columns, out, out_stride);
    case 8: return Product<8>(x, x_stride, w, depth, columns, out, out_stride);
    default: break;
  }
  Product<8>(x, x_stride, w, depth, columns, out, out_stride);
  Products(rows - 8, x + 8 * x_stride, x_stride, w, depth, columns, out + 8 * out_stride, out_stride);
}

struct Experts {
  const float *x, *up, *down;
  const int32_t *row_token, *block_slot;
  float* sorted;  // a row of results for each sorted row
  int num_tokens, width, hidden, block_rows;
};

void RunBlock(const Experts& e, int block) {
  const int width = e.width, hidden = e.hidden;
  const int64_t first = static_cast<int64_t>(block) * e.block_rows;
  int rows = e.block_rows;  // gaps are behind an expert's rows
  while (rows > 0 && e.row_token[first + rows - 1] >= e.num_tokens) --rows;
  if (rows == 0) return;
  thread_local std::vector<float> in, between;
  in.resize(rows * width);
  between.resize(rows * 2 * hidden);
  for (int m = 0; m < rows; ++m) {
    const int token = e.row_token[first + m];
    if (token >= e.num_tokens)
      std::fill_n(&in[m * width], width, 0.0f);
    else
      std::copy_n(e.x + static_cast<int64_t>(token) * width, width, &in[m * width]);
  }
  const int64_t slot = e.block_slot[block];
  Products(rows, in.data(), width, e.up + slot * width * 2 * hidden, width, 2 * hidden, between.data(),
           2 * hidden);
  for (int m = 0; m < rows; ++m) {
    float* gate = &between[m * 2 * hidden];
    for (int f = 0; f < hidden; f += kLanes) {
      const Vec g = Load(gate + f), small = Exp(g > 0.0f ? -g : g);
      const Vec sigmoid = (g > 0.0f ? Vec{} + 1.0f : small) / (1.0f + small);
      Store(gate + f, g * sigmoid * Load(gate + hidden + f));
    }
  }
  Products(rows, between.data(), 2 * hidden, e.down + slot * hidden * width, hidden, width,
           e.sorted + first * width, width);
}

ffi::Error MoeMlp(ffi::ThreadPool pool, Floats x, Floats up, Floats down, Ints row_token,
                  Ints block_slot, Ints num_blocks, Ints visit_row, Floats visit_weight, Result out) {
  const int rows = static_cast<int>(row_token.dimensions()[0]);
  const int blocks = static_cast<int>(block_slot.dimensions()[0]);
  const int picks = static_cast<int>(visit_row.dimensions()[1]);
  auto sorted = std::make_shared<std::vector<float>>(static_cast<int64_t>(rows) * x.dimensions()[1]);
  const Experts e{x.typed_data(),
                  up.typed_data(),
                  down.typed_data(),
                  row_token.typed_data(),
                  block_slot.typed_data(),
                  sorted->data(),
                  static_cast<int>(x.dimensions()[0]),
                  static_cast<int>(x.dimensions()[1]),
                  static_cast<int>(down.dimensions()[1]),
                  rows / blocks};
  // An expert's blocks follow each other, and one thread runs them: weights are read once.
  auto begins = std::make_shared<std::vector<int>>();
  const int used = std::min(*num_blocks.typed_data(), blocks);
  for (int block = 0; block < used; ++block)
    if (block == 0 || e.block_slot[block] != e.block_slot[block - 1]) begins->push_back(block);
  const int active = static_cast<int>(begins->size());
  begins->push_back(used);
  Parallel(pool, active, [e, begins, sorted](int i) {
    for (int block = (*begins)[i]; block < (*begins)[i + 1]; ++block) RunBlock(e, block);
  });
  const int32_t* row_of = visit_row.typed_data();
  const float* weight = visit_weight.typed_data();
  float* to = out->typed_data();
  for (int t = 0; t < e.num_tokens; ++t) {
    float* sum = to + static_cast<int64_t>(t) * e.width;
    std::fill_n(sum, e.width, 0.0f);
    for (int i = t * picks; i < (t + 1) * picks; ++i) {
      if (row_of[i] >= rows) continue;
      const float* from = sorted->data() + static_cast<int64_t>(row_of[i]) * e.width;
      for (int d = 0; d < e.width; d += kLanes)
        Store(sum + d, Load(sum + d) + weight[i] * Load(from + d));
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmoe_attend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("window")
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmoe_moe_mlp, MoeMlp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Ret<Floats>());
