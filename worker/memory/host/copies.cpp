// Copies many pieces of one size in one call, so that a run of them costs the interpreter nothing and is made without its lock.
#include <cstdint>
#include <cstring>

extern "C" void upbeat_copy(int64_t count, const uint64_t* to, const uint64_t* from, int64_t size) {
    for (int64_t i = 0; i < count; i++) {
        std::memcpy(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]), static_cast<std::size_t>(size));
    }
}
