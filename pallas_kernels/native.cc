// Attention over pages and the routed experts for CPUs, as calls that XLA makes (see native.py).
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
#include <numeric>
#include <utility>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
// A handler's binding follows from its function's parameters; this one the headers leave out.
template <>
struct xla::ffi::CtxBinding<ffi::ThreadPool> {
  using Ctx = ffi::ThreadPool;
};

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Result = ffi::ResultBuffer<ffi::F32>;
constexpr char kScale[] = "scale", kWindow[] = "window";
using Scale = ffi::Attr<float, kScale>;
using Window = ffi::Attr<int32_t, kWindow>;
using Flags = ffi::Buffer<ffi::PRED>;
using IntResult = ffi::ResultBuffer<ffi::S32>;
using FlagResult = ffi::ResultBuffer<ffi::PRED>;
constexpr char kBlockRows[] = "block_rows";

namespace {

// A vector is a register: of a larger one GCC makes an array in memory. A tile of products has as many
// sums as registers hold beside what they are made of.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kWide = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kWide = 2;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kWide = 4;
#else
constexpr int kLanes = 4, kWide = 2;
#endif
constexpr float kInfinity = std::numeric_limits<float>::infinity();
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));

inline Vec Load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

struct Bf16 {
  uint16_t bits;
};

inline Vec Load(const Bf16* from) {
  typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
  HalfVec halves;
  std::memcpy(&halves, from, sizeof halves);
  const IntVec bits = __builtin_convertvector(halves, IntVec) << 16;
  Vec v;
  std::memcpy(&v, &bits, sizeof v);
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

// Takes lanes of two vectors: from kLanes on `lanes` are those of `b`.
inline Vec Shuffle(Vec a, Vec b, IntVec lanes) {
#ifdef __clang__
  Vec found;
  for (int i = 0; i < kLanes; ++i) found[i] = lanes[i] < kLanes ? a[lanes[i]] : b[lanes[i] - kLanes];
  return found;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Adds up each of kLanes vectors, which it changes: lane i of the result is the sum of vector i.
template <int half = kLanes / 2>
inline Vec Sums(Vec* v) {
  IntVec own, other;  // lanes of v[i] where the bit `half` is unset, else of v[i + half]
  for (int lane = 0; lane < kLanes; ++lane) {
    const int from = (lane & half) != 0 ? kLanes : 0;
    own[lane] = from + lane;
    other[lane] = from + (lane ^ half);
  }
  for (int i = 0; i < half; ++i)
    v[i] = Shuffle(v[i], v[i + half], own) + Shuffle(v[i], v[i + half], other);
  if constexpr (half > 1) return Sums<half / 2>(v);
  return v[0];
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

constexpr int64_t kWorthTasks = 1 << 19;  // multiplications

// Splits n parts that follow each other into a few tasks for each thread: task(begin, end).
template <typename Task>
void Share(ffi::ThreadPool& pool, int64_t n, Task task) {
  const int64_t tasks = std::min(n, std::max<int64_t>(1, 4 * pool.num_threads()));
  Parallel(pool, tasks, [=](int i) { task(n * i / tasks, n * (i + 1) / tasks); });
}

// -- products -------------------------------------------------------------------------------------

constexpr int kRows = 6;  // of a tile at most, of kWide vectors each
// Keeps a vector in a register: or each row's product loads it again.
inline void Hold(Vec& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX2__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
}

template <typename T = float>
struct Matrix {
  const T* at;
  int64_t stride;
  const T* operator()(int row) const { return at + row * stride; }
};
template <typename T>
Matrix(const T*, int64_t) -> Matrix<T>;

// out = x @ w of a tile, or out += x @ w where it is to `add`: of elements x(m, k) and rows w(k). It
// may fetch a tile of `next`, which is read after it.
template <int rows, int wide, bool fetch, typename X, typename W, typename Next>
inline void Tile(int depth, X x, W w, Next next, bool add, float* out, int64_t out_stride) {
  Vec sums[rows][wide]{};
  if (add)
    for (int m = 0; m < rows; ++m)
      for (int j = 0; j < wide; ++j) sums[m][j] = Load(out + m * out_stride + j * kLanes);
  for (int k = 0; k < depth; ++k) {
    const auto* row = w(k);
    Vec from[wide];
    for (int j = 0; j < wide; ++j) Hold(from[j] = Load(row + j * kLanes));
    if constexpr (fetch)
      for (int j = 0; j < wide; ++j) __builtin_prefetch(next(k) + j * kLanes, 0, 2);
    for (int m = 0; m < rows; ++m) {
      const float by = x(m, k);
      for (int j = 0; j < wide; ++j) sums[m][j] += by * from[j];
    }
  }
  for (int m = 0; m < rows; ++m)
    for (int j = 0; j < wide; ++j) Store(out + m * out_stride + j * kLanes, sums[m][j]);
}

// The same of any number of rows, and of columns that are a multiple of the lanes. A row's sums go by
// rising k whatever the number of rows is.
template <bool fetch = false, int wide = kWide, typename X, typename W, typename Next = Matrix<>>
void Product(int rows, int columns, int depth, X x, W w, bool add, float* out, int64_t out_stride,
             Next next = {}, int n = 0) {
  for (; n + wide * kLanes <= columns; n += wide * kLanes) {
    auto from = [w, n](int k) { return w(k) + n; };
    Next after = next;
    if constexpr (fetch)
      if (n + wide * kLanes < columns) after = {from(0) + wide * kLanes, w.stride};
    for (int m = 0, size; m < rows; m += size) {
      const int left = rows - m;
      size = left <= kRows ? left : left < 2 * kRows ? left / 2 : kRows;
      auto at = [x, m](int i, int k) { return x(m + i, k); };
      float* to = out + m * out_stride + n;
      switch (size) {
        case 1: Tile<1, wide, fetch>(depth, at, from, after, add, to, out_stride); break;
        case 2: Tile<2, wide, fetch>(depth, at, from, after, add, to, out_stride); break;
        case 3: Tile<3, wide, fetch>(depth, at, from, after, add, to, out_stride); break;
        case 4: Tile<4, wide, fetch>(depth, at, from, after, add, to, out_stride); break;
        case 5: Tile<5, wide, fetch>(depth, at, from, after, add, to, out_stride); break;
        default: Tile<6, wide, fetch>(depth, at, from, after, add, to, out_stride);
      }
    }
  }
  if constexpr (wide > 1)
    if (n < columns) Product<fetch, wide / 2>(rows, columns, depth, x, w, add, out, out_stride, next, n);
}

constexpr int kDepth = 64;  // rows of weights that are read before the columns beside them

// out = x @ w of weights in memory. Rows of wide matrices are pages apart, often by a power of two, so
// that no cache holds a column's tile: few rows of x read weights along their rows, and many read a
// panel of them that is packed, and widened to float32, once.
template <typename X, typename T>
void Multiply(int rows, int columns, int depth, X x, Matrix<T> w, float* out, int64_t out_stride,
              Matrix<T> next) {
  constexpr int kPanel = kWide * kLanes;
  thread_local std::vector<Vec> memory(kDepth * kWide);
  float* packed = reinterpret_cast<float*>(memory.data());
  for (int k = 0; k < depth; k += kDepth) {
    const int size = std::min(kDepth, depth - k);
    const bool add = k > 0;
    auto at = [x, k](int m, int i) { return x(m, k + i); };
    if (rows <= 2 * kRows) {  // the time is that of reading weights
      const Matrix<T> after = k + size < depth ? Matrix<T>{w(k + size), w.stride} : next;
      Product<true>(rows, columns, size, at, Matrix<T>{w(k), w.stride}, add, out, out_stride, after);
      continue;
    }
    for (int n = 0; n < columns; n += kPanel) {
      const int width = std::min(kPanel, columns - n);
      for (int i = 0; i < size; ++i)
        for (int j = 0; j < width; j += kLanes) Store(packed + i * kPanel + j, Load(w(k + i) + n + j));
      Product(rows, width, size, at, Matrix<>{packed, kPanel}, add, out + n, out_stride);
    }
  }
}

// -- attention ----------------------------------------------------------------------------------

constexpr int kKeys = 64;  // that are scored at a time

// Widens a row of e4m3 numbers and multiplies it by its scale; the scale of a NaN is one, too. XLA's
// threads take numbers that are not normal for zero, so nothing is computed of such.
inline void Widen(const uint8_t* from, float scale, int n, float* to) {
#ifdef __AVX512F__
  scale *= 256.0f;  // as numbers of half precision, whose exponents are biased by eight more
#endif
  for (int i = 0; i < n; i += kLanes) {
    Vec number;
#ifdef __AVX512F__
    const __m256i high = _mm256_slli_epi16(
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))), 8);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(int16_t(0xbf80)));
    const __m512 wide = _mm512_cvtph_ps(half);
    std::memcpy(&number, &wide, sizeof number);
#else
    typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));
    ByteVec bytes;
    std::memcpy(&bytes, from + i, sizeof bytes);
    const IntVec wide = __builtin_convertvector(bytes, IntVec), size = wide & 0x7f;
    const IntVec normal = (size << 20) + (120 << 23);  // a biased exponent of 7 becomes one of 127
    const IntVec plus_one = (size << 20) + (121 << 23);  // (1 + m / 8) 2^-6 where no bit leads
    Vec small;
    std::memcpy(&number, &normal, sizeof number);
    std::memcpy(&small, &plus_one, sizeof small);
    number = size < 8 ? small - 0x1p-6f : number;
    IntVec bits;
    std::memcpy(&bits, &number, sizeof bits);
    bits |= (wide & 0x80) << 24;
    std::memcpy(&number, &bits, sizeof number);
#endif
    Store(to + i, number * scale);
  }
}

// Pages of keys or values: in float32, bfloat16, or e4m3 with a scale for each row of a head.
struct Pages {
  const float* wide;
  const Bf16* halves;
  const uint8_t* bits;
  const float* scales;

  static Pages Of(const ffi::AnyBuffer& numbers, const Floats& scales) {
    const void* at = numbers.untyped_data();
    switch (numbers.element_type()) {
      case ffi::F32: return {static_cast<const float*>(at), nullptr, nullptr, nullptr};
      case ffi::BF16: return {nullptr, static_cast<const Bf16*>(at), nullptr, nullptr};
      default: return {nullptr, nullptr, static_cast<const uint8_t*>(at), scales.typed_data()};
    }
  }

  // Returns a row, which is widened into `room` where it has to be.
  const float* Row(int64_t row, int dim, float* room) const {
    if (wide != nullptr) return wide + row * dim;
    if (bits != nullptr)
      Widen(bits + row * dim, scales[row], dim, room);
    else
      for (int d = 0; d < dim; d += kLanes) Store(room + d, Load(halves + row * dim + d));
    return room;
  }
};

struct Attention {
  const float *q, *sinks;
  Pages k, v;
  const int32_t *table, *kv_len;
  float* out;
  int64_t first_page;
  int heads, kv_heads, head_dim, page_size, max_pages, window;
  float scale;

  // Elements that `Find` needs as room for so many positions.
  int64_t Room(int n) const { return k.wide != nullptr ? 0 : 2 * static_cast<int64_t>(n) * head_dim; }

  // Finds keys and values of positions that follow each other.
  void Find(int sequence, int g, int position, int n, const float** keys, const float** values,
            float* room) const {
    for (int c = 0; c < n;) {
      const int64_t entry = static_cast<int64_t>(sequence) * max_pages + (position + c) / page_size;
      int offset = (position + c) % page_size;
      int64_t row = ((first_page + table[entry]) * kv_heads + g) * page_size + offset;
      for (; c < n && offset < page_size; ++c, ++offset, ++row) {
        keys[c] = k.Row(row, head_dim, room + 2 * c * head_dim);
        values[c] = v.Row(row, head_dim, room + (2 * c + 1) * head_dim);
      }
    }
  }
};

// Decode: one row and one key-value head.
void AttendHead(const Attention& a, int b, int g) {
  const int group = a.heads / a.kv_heads, dim = a.head_dim, length = a.kv_len[b];
  const int64_t row = static_cast<int64_t>(b) * a.heads + g * group;
  thread_local std::vector<Vec> memory;  // is aligned
  memory.resize((group * (dim + kKeys) + 2 * a.Room(kKeys)) / kLanes);
  float *acc = reinterpret_cast<float*>(memory.data()), *scores = acc + group * dim;
  std::fill_n(acc, group * dim, 0.0f);
  std::vector<float> top(a.sinks + row, a.sinks + row + group), norm(group);
  for (int h = 0; h < group; ++h) norm[h] = top[h] == -kInfinity ? 0.0f : 1.0f;
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  struct Block {
    int n;
    const float *keys[kKeys], *values[kKeys];
    float* room;
  } blocks[2];  // one that is computed, and the one after it
  blocks[0].room = scores + group * kKeys;
  blocks[1].room = blocks[0].room + a.Room(kKeys);
  auto fetch = [&](Block& block, int at) {
    block.n = std::min(kKeys, length - at);
    a.Find(b, g, at, block.n, block.keys, block.values, block.room);
    if (a.k.wide == nullptr) return;
    for (int c = 0; c < block.n; ++c)
      for (int d = 0; d < dim; d += kLanes) {
        __builtin_prefetch(block.keys[c] + d, 0, 2);
        __builtin_prefetch(block.values[c] + d, 0, 2);
      }
  };
  int at = a.window > 0 ? std::max(0, length - a.window) : 0;
  fetch(blocks[0], at);
  for (int i = 0; at < length; ++i) {
    const auto& [n, keys, values, room] = blocks[i % 2];
    at += n;
    fetch(blocks[(i + 1) % 2], at);
    for (int h = 0; h < group; ++h) {
      const float* q = a.q + (row + h) * dim;
      float* p = scores + h * kKeys;
      Vec largest = Vec{} + top[h];
      for (int c = 0; c < n; c += kLanes) {
        Vec dots[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const float* k = keys[std::min(c + i, n - 1)];
          dots[i] = Load(q) * Load(k);
          for (int d = kLanes; d < dim; d += kLanes) dots[i] += Load(q + d) * Load(k + d);
        }
        const Vec s = lane < n - c ? Sums(dots) * a.scale : Vec{} - kInfinity;
        Store(p + c, s);
        largest = s > largest ? s : largest;
      }
      float most = top[h];
      for (int i = 0; i < kLanes; ++i) most = largest[i] > most ? largest[i] : most;
      const float pivot = most == -kInfinity ? 0.0f : most;
      Vec weights{};
      for (int c = 0; c < n; c += kLanes) {
        const Vec e = Exp(Load(p + c) - pivot);
        Store(p + c, e);
        weights += e;
      }
      const float keep = std::exp(top[h] - pivot);
      norm[h] = norm[h] * keep + Sum(weights);
      top[h] = most;
      for (int d = 0; d < dim; d += kLanes) Store(acc + h * dim + d, Load(acc + h * dim + d) * keep);
    }
    auto weight = [scores](int h, int c) { return scores[h * kKeys + c]; };
    auto value = [rows = &values[0]](int c) { return rows[c]; };
    Product(group, dim, n, weight, value, true, acc, dim);
  }
  for (int h = 0; h < group; ++h)
    for (int d = 0; d < dim; ++d)
      a.out[(row + h) * dim + d] = acc[h * dim + d] / (norm[h] < 1e-30f ? 1e-30f : norm[h]);
}

constexpr int kQueries = 64;  // rows by query heads of a tile, but where one row has more heads

struct Rows {
  int chunk, first, count;
  int seen;  // positions that the first row sees
};

// Prefill: rows of a chunk and one key-value head. Queries lie side by side, so that what concerns a
// score concerns a lane. Keys are scored in blocks that begin at multiples of kKeys, whatever the rows.
void AttendRows(const Attention& a, const Rows& rows, int g) {
  const int group = a.heads / a.kv_heads, dim = a.head_dim, queries = rows.count * group;
  const int vecs = (queries + kLanes - 1) / kLanes, wide = vecs * kLanes;
  thread_local std::vector<Vec> memory;  // is aligned
  const int64_t own = static_cast<int64_t>(vecs) * (2 * dim + kKeys + 3);
  memory.resize(own + a.Room(kKeys) / kLanes);
  std::fill_n(memory.begin(), own, Vec{});
  float *q = reinterpret_cast<float*>(memory.data()), *acc = q + dim * wide, *scores = acc + dim * wide;
  float *top = scores + kKeys * wide, *norm = top + wide;
  auto* seen = reinterpret_cast<IntVec*>(norm + wide);
  float* room = norm + 2 * wide;
  auto query = [&](int i) {
    return (static_cast<int64_t>(rows.first + i / group) * a.heads + g * group + i % group) * dim;
  };
  std::fill_n(top, wide, -kInfinity);
  for (int i = 0; i < queries; ++i) {
    const float* from = a.q + query(i);
    for (int d = 0; d < dim; ++d) q[d * wide + i] = from[d];
    seen[i / kLanes][i % kLanes] = rows.seen + i / group;
    top[i] = a.sinks[g * group + i % group];
    norm[i] = top[i] == -kInfinity ? 0.0f : 1.0f;
  }
  const int end = rows.seen + rows.count - 1, window = a.window;
  const float *keys[kKeys], *values[kKeys];
  for (int at = window > 0 ? std::max(0, rows.seen - window) : 0, n; at < end; at += n) {
    n = std::min(kKeys - at % kKeys, end - at);
    a.Find(rows.chunk, g, at, n, keys, values, room);
    auto key = [&keys](int c, int d) { return keys[c][d]; };
    Product(n, wide, dim, key, Matrix{q, wide}, false, scores, wide);
    for (int j = 0; j < vecs; ++j) {
      const Vec before = Load(top + j * kLanes);
      Vec most = before, weights{};
      for (int c = 0; c < n; ++c) {
        float* score = scores + c * wide + j * kLanes;
        IntVec live = at + c < seen[j];
        if (window > 0) live &= at + c >= seen[j] - window;
        const Vec s = live ? Load(score) * a.scale : Vec{} - kInfinity;
        Store(score, s);
        most = s > most ? s : most;
      }
      const Vec pivot = most == -kInfinity ? Vec{} : most;
      for (int c = 0; c < n; ++c) {
        float* score = scores + c * wide + j * kLanes;
        const Vec e = Exp(Load(score) - pivot);
        Store(score, e);
        weights += e;
      }
      const Vec keep = Exp(before - pivot);
      Store(norm + j * kLanes, Load(norm + j * kLanes) * keep + weights);
      Store(top + j * kLanes, most);
      for (int d = 0; d < dim; ++d) {
        float* sum = acc + d * wide + j * kLanes;
        Store(sum, Load(sum) * keep);
      }
    }
    auto value = [&values](int d, int c) { return values[c][d]; };
    Product(dim, wide, n, value, Matrix{scores, wide}, true, acc, wide);
  }
  for (int i = 0; i < queries; ++i)
    for (int d = 0; d < dim; ++d)
      a.out[query(i) + d] = acc[d * wide + i] / (norm[i] < 1e-30f ? 1e-30f : norm[i]);
}

Attention Over(Floats q, ffi::AnyBuffer k, ffi::AnyBuffer v, Floats k_scales, Floats v_scales,
               Floats sinks, Ints layer, Ints table, Ints kv_len, Scale scale, Window window,
               Result out) {
  const auto pages = k.dimensions();
  return {q.typed_data(),
          sinks.typed_data(),
          Pages::Of(k, k_scales),
          Pages::Of(v, v_scales),
          table.typed_data(),
          kv_len.typed_data(),
          out->typed_data(),
          *layer.typed_data() * pages[1],
          static_cast<int>(q.dimensions()[1]),
          static_cast<int>(pages[2]),
          static_cast<int>(pages[4]),
          static_cast<int>(pages[3]),
          static_cast<int>(table.dimensions()[1]),
          *window,
          *scale};
}

ffi::Error Attend(ffi::ThreadPool pool, Floats q, ffi::AnyBuffer k, ffi::AnyBuffer v, Floats k_scales,
                  Floats v_scales, Floats sinks, Ints layer, Ints table, Ints kv_len, Scale scale,
                  Window window, Result out) {
  const Attention a =
      Over(q, k, v, k_scales, v_scales, sinks, layer, table, kv_len, scale, window, out);
  const int rows = static_cast<int>(q.dimensions()[0]);
  Parallel(pool, rows * a.kv_heads, [a](int i) { AttendHead(a, i / a.kv_heads, i % a.kv_heads); });
  return ffi::Error::Success();
}

ffi::Error Prefill(ffi::ThreadPool pool, Floats q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   Floats k_scales, Floats v_scales, Floats sinks, Ints layer, Ints table,
                   Ints q_start, Ints kv_len, Scale scale, Window window, Result out) {
  const Attention a =
      Over(q, k, v, k_scales, v_scales, sinks, layer, table, kv_len, scale, window, out);
  const int chunks = static_cast<int>(table.dimensions()[0]);
  const int size = std::max(1, kQueries / (a.heads / a.kv_heads));
  const int32_t* start = q_start.typed_data();
  auto tiles = std::make_shared<std::vector<Rows>>();
  for (int n = 0; n < chunks; ++n)
    for (int first = start[n]; first < start[n + 1]; first += size)
      tiles->push_back(
          {n, first, std::min(size, start[n + 1] - first), a.kv_len[n] - start[n + 1] + first + 1});
  std::sort(tiles->begin(), tiles->end(), [](const Rows& one, const Rows& other) {
    return one.seen > other.seen;  // the longest first
  });
  const int64_t row = static_cast<int64_t>(a.heads) * a.head_dim;
  std::fill(a.out + start[chunks] * row, a.out + q.dimensions()[0] * row, 0.0f);
  Parallel(pool, static_cast<int>(tiles->size()) * a.kv_heads,
           [a, tiles](int i) { AttendRows(a, (*tiles)[i / a.kv_heads], i % a.kv_heads); });
  return ffi::Error::Success();
}

// -- experts --------------------------------------------------------------------------------------

template <typename T>
struct Experts {
  const float* x;
  const T *up, *down;
  const int32_t *row_token, *block_slot;
  float* sorted;  // a row of results for each sorted row
  int num_tokens, width, hidden, blocks, block_rows;
};

// Blocks of one expert.
template <typename T>
void RunBlocks(const Experts<T>& e, int begin, int end) {
  const int width = e.width, hidden = e.hidden;
  const int64_t first = static_cast<int64_t>(begin) * e.block_rows;
  int rows = (end - begin) * e.block_rows;  // gaps are behind an expert's rows
  while (rows > 0 && e.row_token[first + rows - 1] >= e.num_tokens) --rows;
  thread_local std::vector<Vec> memory;  // is aligned
  memory.resize(static_cast<int64_t>(rows) * (width + 2 * hidden) / kLanes);
  auto* in = reinterpret_cast<float*>(memory.data());
  float* between = in + rows * width;
  for (int m = 0; m < rows; ++m) {
    const int token = e.row_token[first + m];
    if (token >= e.num_tokens)
      std::fill_n(in + m * width, width, 0.0f);
    else
      std::copy_n(e.x + static_cast<int64_t>(token) * width, width, in + m * width);
  }
  const int64_t slot = e.block_slot[begin], next = e.block_slot[std::min(end, e.blocks - 1)];
  const Matrix<T> up{e.up + slot * width * 2 * hidden, 2 * hidden};
  const Matrix<T> down{e.down + slot * hidden * width, width};
  auto product = [rows](const float* x, int64_t stride, Matrix<T> w, int depth, int columns,
                        float* out, int64_t out_stride, Matrix<T> after) {
    auto row = [x, stride](int m, int k) { return x[m * stride + k]; };
    Multiply(rows, columns, depth, row, w, out, out_stride, after);
  };
  product(in, width, up, width, 2 * hidden, between, 2 * hidden, down);
  for (int m = 0; m < rows; ++m) {
    float* gate = between + m * 2 * hidden;
    for (int f = 0; f < hidden; f += kLanes) {
      const Vec g = Load(gate + f), small = Exp(g > 0.0f ? -g : g);
      const Vec sigmoid = (g > 0.0f ? Vec{} + 1.0f : small) / (1.0f + small);
      Store(gate + f, g * sigmoid * Load(gate + hidden + f));
    }
  }
  product(between, 2 * hidden, down, hidden, width, e.sorted + first * width, width,
          {e.up + next * width * 2 * hidden, 2 * hidden});
}

constexpr int kTaskRows = 64;  // of an expert that a task computes

template <typename T>
ffi::Error MoeMlpOf(ffi::ThreadPool& pool, Floats x, ffi::AnyBuffer up, ffi::AnyBuffer down,
                    Ints row_token, Ints block_slot, Ints num_blocks, Ints visit_row,
                    Floats visit_weight, Result out, Result sorted) {
  const int rows = static_cast<int>(row_token.dimensions()[0]);
  const int blocks = static_cast<int>(block_slot.dimensions()[0]);
  const int picks = static_cast<int>(visit_row.dimensions()[1]);
  const Experts<T> e{x.typed_data(),
                     static_cast<const T*>(up.untyped_data()),
                     static_cast<const T*>(down.untyped_data()),
                     row_token.typed_data(),
                     block_slot.typed_data(),
                     sorted->typed_data(),
                     static_cast<int>(x.dimensions()[0]),
                     static_cast<int>(x.dimensions()[1]),
                     static_cast<int>(down.dimensions()[1]),
                     blocks,
                     rows / blocks};
  // An expert's blocks follow each other, and one thread runs them: weights are read once.
  auto begins = std::make_shared<std::vector<int>>();
  const int used = std::min(*num_blocks.typed_data(), blocks);
  for (int block = 0; block < used; ++block)
    if (block == 0 || e.block_slot[block] != e.block_slot[block - 1] ||
        (block - begins->back()) * e.block_rows >= kTaskRows)
      begins->push_back(block);
  const int tasks = static_cast<int>(begins->size());
  begins->push_back(used);
  Parallel(pool, tasks, [e, begins](int i) { RunBlocks(e, (*begins)[i], (*begins)[i + 1]); });
  const int32_t* row_of = visit_row.typed_data();
  const float* weight = visit_weight.typed_data();
  float* to = out->typed_data();
  auto merge = [=](int begin, int end) {
    for (int t = begin; t < end; ++t)
      for (int d = 0; d < e.width; d += kLanes) {
        Vec sum{};
        for (int i = t * picks; i < (t + 1) * picks; ++i)
          if (row_of[i] < rows)
            sum += weight[i] * Load(e.sorted + static_cast<int64_t>(row_of[i]) * e.width + d);
        Store(to + static_cast<int64_t>(t) * e.width + d, sum);
      }
  };
  if (static_cast<int64_t>(e.num_tokens) * picks * e.width < kWorthTasks)
    merge(0, e.num_tokens);
  else
    Share(pool, e.num_tokens, merge);
  return ffi::Error::Success();
}

ffi::Error MoeMlp(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer up, ffi::AnyBuffer down,
                  Ints row_token, Ints block_slot, Ints num_blocks, Ints visit_row,
                  Floats visit_weight, Result out, Result sorted) {
  const auto run = up.element_type() == ffi::F32 ? MoeMlpOf<float> : MoeMlpOf<Bf16>;
  return run(pool, x, up, down, row_token, block_slot, num_blocks, visit_row, visit_weight, out,
             sorted);
}

// -- routing --------------------------------------------------------------------------------------

constexpr int kByWeight = 4, kZero = 0, kFull = 1;

// What a layer's rows visited, and who serves it: `reference.targets`.
struct Visits {
  std::vector<int32_t> count, share;  // of degradable rows
  std::vector<char> pinned;
  int64_t total = 0;

  // Returns experts: pinned ones, then those of most, ties to the lower one.
  std::vector<int> Ordered(const std::vector<int32_t>& most) const {
    std::vector<int> order(most.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int one, int other) {
      if (pinned[one] != pinned[other]) return pinned[one] > pinned[other];
      return most[one] != most[other] ? most[one] > most[other] : one < other;
    });
    return order;
  }

  // Finds S1, and the logical expert that serves each expert's degradable visits (-1: none).
  void Plan(const int32_t* groups, int united, int threshold_percent, int strategy, bool* s1,
            int32_t* target) {
    const int experts = static_cast<int>(count.size());
    int64_t before = 0;
    int originals = 0;
    for (int e : Ordered(count)) {
      s1[e] = pinned[e] || 100 * before < threshold_percent * total;
      before += count[e];
      originals += s1[e];
    }
    if (strategy >= kByWeight) {
      for (int e = 0; e < experts; ++e)
        if (count[e] == 0) share[e] = -1;
      int place = 0;
      for (int e : Ordered(share)) s1[e] = pinned[e] || (count[e] > 0 && place < originals), ++place;
    }
    strategy &= kByWeight - 1;
    std::vector<int> members(united);
    auto has_group = [groups, united](int e) { return groups[e] >= 0 && groups[e] < united; };
    for (int e = 0; e < experts; ++e)
      if (!s1[e] && count[e] > 0 && has_group(e)) ++members[groups[e]];
    for (int e = 0; e < experts; ++e) {
      target[e] = e;
      if (s1[e] || strategy == kZero) continue;
      if (strategy == kFull)
        target[e] = -1;
      else if (has_group(e) && members[groups[e]] > 1)
        target[e] = experts + groups[e];
    }
  }
};

ffi::Error Route(Ints ids, Floats weights, Ints groups, Ints slots, Ints threshold_percent, Ints strategy,
                 Flags valid, Flags exempt, Scale scale, ffi::Attr<int32_t, kBlockRows> block_rows,
                 IntResult expert_ids, FlagResult degraded, FlagResult s1, IntResult row_token,
                 IntResult block_slot, IntResult num_blocks, IntResult visit_row, Result visit_weight,
                 IntResult expert_rows, IntResult expert_start) {
  const int rows = static_cast<int>(ids.dimensions()[0]), picks = static_cast<int>(ids.dimensions()[1]);
  const int experts = static_cast<int>(groups.dimensions()[0]);
  const int logical = static_cast<int>(slots.dimensions()[0]);
  const int sorted = static_cast<int>(row_token->dimensions()[0]);
  const bool *is_valid = valid.typed_data(), *is_exempt = exempt.typed_data();
  const int32_t* chosen = ids.typed_data();
  int32_t* served = expert_ids->typed_data();
  float* weight = visit_weight->typed_data();
  std::copy_n(weights.typed_data(), weights.element_count(), weight);
  Visits visits{std::vector<int32_t>(experts), std::vector<int32_t>(experts),
                std::vector<char>(experts)};
  const float most = *scale * (1 << 15) / rows, unit = (1 << 15) / *scale;
  for (int t = 0; t < rows; ++t) {
    if (!is_valid[t]) continue;
    if (!is_exempt[t]) visits.total += picks;
    for (int64_t i = static_cast<int64_t>(t) * picks; i < static_cast<int64_t>(t + 1) * picks; ++i) {
      if (is_exempt[t]) {
        visits.pinned[chosen[i]] = 1;
        continue;
      }
      ++visits.count[chosen[i]];
      if (const float w = std::min(weight[i], most); w > 0.0f)
        visits.share[chosen[i]] += static_cast<int32_t>(w * unit + 0.5f);
    }
  }
  std::vector<int32_t> target(experts);
  visits.Plan(groups.typed_data(), logical - experts, *threshold_percent.typed_data(), *strategy.typed_data(),
              s1->typed_data(), target.data());

  // Sorts the visits by expert. A row's picks that meet in one are one visit of their weights' sum.
  int32_t *count = expert_rows->typed_data(), *start = expert_start->typed_data();
  std::fill_n(count, logical, 0);
  for (int t = 0; t < rows; ++t)
    for (int k = 0; k < picks; ++k) {
      const int64_t first = static_cast<int64_t>(t) * picks, i = first + k;
      const bool serves = is_valid[t];
      served[i] = !serves ? -1 : is_exempt[t] ? chosen[i] : target[chosen[i]];
      degraded->typed_data()[i] = serves && served[i] != chosen[i];
      const int64_t same = std::find(served + first, served + i, served[i]) - served;
      if (same < i && served[i] >= 0) weight[same] += weight[i];
      if (same < i || served[i] < 0)
        weight[i] = 0.0f;
      else
        ++count[served[i]];
    }
  const int size = *block_rows, blocks = static_cast<int>(block_slot->dimensions()[0]);
  const int32_t* slot = slots.typed_data();
  int32_t* slot_of = block_slot->typed_data();
  int used = 0;
  for (int e = 0; e < logical; ++e) {
    start[e] = used * size;
    for (int left = count[e]; left > 0; left -= size, ++used)
      if (used < blocks) slot_of[used] = slot[e];
  }
  *num_blocks->typed_data() = used;
  for (int b = used; b < blocks; ++b) slot_of[b] = used > 0 ? slot_of[used - 1] : slot[logical - 1];
  std::fill_n(row_token->typed_data(), sorted, rows);
  std::vector<int32_t> next(start, start + logical);
  for (int t = 0; t < rows; ++t)
    for (int k = 0; k < picks; ++k) {
      const int64_t first = static_cast<int64_t>(t) * picks, i = first + k;
      const bool is_first = std::find(served + first, served + i, served[i]) == served + i;
      int32_t& row = visit_row->typed_data()[i] = sorted;
      if (!is_first || served[i] < 0) continue;
      row = next[served[i]]++;
      if (row < sorted) row_token->typed_data()[row] = t;
    }
  return ffi::Error::Success();
}

// -- projections ----------------------------------------------------------------------------------

constexpr int kTaskColumns = 64;   // of a product: a task computes some times as many
constexpr int kCachedRows = 256;  // that meet a panel of weights while caches hold them

// out = x @ w[layer], of weights that are stacked by layer.
template <typename T>
void ProjectOf(ffi::ThreadPool& pool, Floats x, ffi::AnyBuffer w, int layer, Result out) {
  const int rows = static_cast<int>(x.dimensions()[0]), depth = static_cast<int>(x.dimensions()[1]);
  const int columns = static_cast<int>(w.dimensions()[2]);
  const float* in = x.typed_data();
  const T* from = static_cast<const T*>(w.untyped_data()) + static_cast<int64_t>(layer) * depth * columns;
  float* to = out->typed_data();
  auto run = [=](int begin, int end) {
    const Matrix<T> part{from + begin, columns};
    for (int first = 0; first < rows; first += kCachedRows) {
      auto at = [=](int m, int k) { return in[static_cast<int64_t>(first + m) * depth + k]; };
      Multiply(std::min(kCachedRows, rows - first), end - begin, depth, at, part,
               to + static_cast<int64_t>(first) * columns + begin, columns, part);
    }
  };
  if (static_cast<int64_t>(rows) * depth * columns < kWorthTasks) return run(0, columns);
  Share(pool, (columns + kTaskColumns - 1) / kTaskColumns, [=](int begin, int end) {
    run(begin * kTaskColumns, std::min(end * kTaskColumns, columns));
  });
}

ffi::Error Project(ffi::ThreadPool pool, Floats x, ffi::AnyBuffer w, Ints layer, Result out) {
  const auto run = w.element_type() == ffi::F32 ? ProjectOf<float> : ProjectOf<Bf16>;
  run(pool, x, w, *layer.typed_data(), out);
  return ffi::Error::Success();
}

}  // namespace

extern "C" const int jmoe_lanes = kLanes;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmoe_attend, Attend);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmoe_prefill, Prefill);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmoe_moe_mlp, MoeMlp);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmoe_route, Route);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmoe_project, Project);
