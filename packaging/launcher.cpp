// The head of the single file: unpacks what is appended to it once, and runs it from there.
//
// The file is this program, a zstd frame with the contents of all files one after the other, a zstd
// frame with the index, and a trailer of kTrailerBytes (packaging/pack.py writes them). A line of
// the index is "f MODE SIZE PATH" or "l TARGET PATH", sorted by path. The copy lies in a folder
// that has the payload's SHA-256 in its name and appears there by a rename, whole; each start
// compares every file's size, mode and time with the index, and makes the copy anew if one differs.
// Static: it needs /proc and nothing else of the host.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

constexpr int kHostLacks = 71;  // errors.Exit.DEVICE_MISSING
constexpr size_t kTrailerBytes = 160;
constexpr size_t kIndexLimitBytes = 4 << 20;
constexpr uint64_t kSpareBytes = 16 << 20;  // that must be left on the disk
constexpr timespec kTime{946684800, 0};     // of every file: a change shows
constexpr const char* kProgram = "pdnode";  // in the folder

struct Failure : std::runtime_error {
  using runtime_error::runtime_error;
};

Failure failure(const std::string& what) { return Failure(what + ": " + std::strerror(errno)); }

struct Fd {
  int number;
  explicit Fd(int fd) : number(fd) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() {
    if (number >= 0) close(number);
  }
};

struct Entry {
  bool link;
  mode_t mode;
  uint64_t size;
  std::string target;
  std::string path;
};

struct Trailer {
  uint64_t payload_bytes, index_bytes, unpacked_bytes;
  std::string hash;
};

std::string read_at(int fd, off_t offset, size_t size) {
  std::string bytes(size, '\0');
  for (size_t done = 0; done < size;) {
    const ssize_t got = pread(fd, &bytes[done], size - done, offset + static_cast<off_t>(done));
    if (got <= 0) throw Failure("this file is cut short; copy it again");
    done += static_cast<size_t>(got);
  }
  return bytes;
}

Trailer read_trailer(int fd, off_t size) {
  const off_t start = std::max<off_t>(0, size - static_cast<off_t>(kTrailerBytes));
  std::istringstream words(read_at(fd, start, kTrailerBytes));
  std::string magic;
  Trailer trailer{};
  words >> magic >> trailer.payload_bytes >> trailer.index_bytes >> trailer.unpacked_bytes >>
      trailer.hash;
  const uint64_t room = static_cast<uint64_t>(start);
  if (!words || magic != "pdnode-file-1" || trailer.hash.size() != 64 ||
      trailer.index_bytes > room || trailer.payload_bytes > room - trailer.index_bytes)
    throw Failure("this file is cut short or damaged; copy it again");
  return trailer;
}

std::vector<Entry> read_index(const std::string& frame) {
  std::string text(kIndexLimitBytes, '\0');
  const size_t size = ZSTD_decompress(text.data(), text.size(), frame.data(), frame.size());
  if (ZSTD_isError(size)) throw Failure("this file is damaged (index); copy it again");
  text.resize(size);
  std::istringstream lines(text);
  std::vector<Entry> entries;
  std::string kind;
  while (lines >> kind) {
    Entry entry{kind == "l", 0, 0, "", ""};
    if (entry.link)
      lines >> entry.target;
    else
      lines >> std::oct >> entry.mode >> std::dec >> entry.size;
    lines >> entry.path;
    const fs::path path(entry.path);
    if (!lines || path.is_absolute() ||
        std::find(path.begin(), path.end(), fs::path("..")) != path.end())
      throw Failure("this file's index is wrong; copy it again");
    entries.push_back(entry);
  }
  return entries;
}

// Whether nobody but this user and root can put something into `directory` or replace it there.
// Empty: yes; else why not.
std::string distrust(const fs::path& directory, bool own) {
  struct stat found {};
  if (lstat(directory.c_str(), &found) != 0) return std::strerror(errno);
  if (!S_ISDIR(found.st_mode)) return "not a directory";
  if (found.st_uid != geteuid() && (own || found.st_uid != 0)) return "belongs to another user";
  if ((found.st_mode & (S_IWGRP | S_IWOTH)) && (own || !(found.st_mode & S_ISVTX)))
    return "others may write to it";
  return "";
}

// Empty if the copy may be kept in `base`, which is made if need be; else why not.
std::string objection(const fs::path& base) {
  if (!base.is_absolute()) return "not an absolute path";
  std::error_code error;
  fs::create_directories(base.parent_path(), error);
  if (!error && mkdir(base.c_str(), 0755) != 0 && errno != EEXIST) return std::strerror(errno);
  if (error) return error.message();
  const std::string why = distrust(fs::canonical(base, error), false);
  if (!why.empty()) return why;
  return access(base.c_str(), W_OK | X_OK) == 0 ? "" : std::strerror(errno);
}

fs::path choose_base() {
  const auto variable = [](const char* name) -> std::string {
    const char* value = getenv(name);
    return value ? value : "";
  };
  if (const std::string named = variable("PDNODE_CACHE"); !named.empty()) {
    const std::string why = objection(named);
    if (why.empty()) return named;
    throw Failure("PDNODE_CACHE: " + named + ": " + why);
  }
  std::vector<fs::path> candidates;
  // systemd's, of the unit; it may list several.
  const std::string unit = variable("CACHE_DIRECTORY");
  if (!unit.empty()) candidates.emplace_back(unit.substr(0, unit.find(':')));
  candidates.emplace_back("/var/cache/pdnode");
  if (const std::string xdg = variable("XDG_CACHE_HOME"); !xdg.empty())
    candidates.push_back(fs::path(xdg) / "pdnode");
  if (const std::string home = variable("HOME"); !home.empty())
    candidates.push_back(fs::path(home) / ".cache" / "pdnode");
  std::string tried;
  for (const fs::path& base : candidates) {
    const std::string why = objection(base);
    if (why.empty()) return base;
    tried += "\n  " + base.string() + ": " + why;
  }
  throw Failure("no folder to unpack into; name one in PDNODE_CACHE. Tried:" + tried);
}

// Empty if every file of the index is there as it was unpacked; else the first that is not.
std::string difference(const fs::path& copy, const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    struct stat found {};
    const std::string path = copy / entry.path;
    const bool there = lstat(path.c_str(), &found) == 0;
    std::error_code error;
    const bool same =
        entry.link ? fs::read_symlink(path, error) == fs::path(entry.target)
                   : S_ISREG(found.st_mode) && (found.st_mode & 07777) == entry.mode &&
                         static_cast<uint64_t>(found.st_size) == entry.size &&
                         found.st_mtim.tv_sec == kTime.tv_sec && found.st_mtim.tv_nsec == 0;
    if (!there || !same || found.st_uid != geteuid()) return entry.path;
  }
  return "";
}

// The payload, piece by piece.
class Stream {
 public:
  Stream(int fd, off_t start, uint64_t size)
      : fd_(fd), offset_(start), left_(size), in_(ZSTD_DStreamInSize(), '\0'),
        out_(ZSTD_DStreamOutSize(), '\0'), context_(ZSTD_createDCtx()) {
    if (!context_) throw Failure("not enough memory");
    ZSTD_DCtx_setParameter(context_, ZSTD_d_windowLogMax, 27);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { ZSTD_freeDCtx(context_); }

  void copy_to(int target, uint64_t size, const fs::path& path) {
    while (size > 0) {
      if (given_ == filled_) more();
      if (given_ == filled_) throw Failure("this file is damaged; copy it again");
      const size_t piece = std::min<uint64_t>(size, filled_ - given_);
      const ssize_t written = write(target, &out_[given_], piece);
      if (written < 0) throw failure(path);
      given_ += static_cast<size_t>(written);
      size -= static_cast<uint64_t>(written);
    }
  }

  // The frame's checksum is compared where its last byte is read.
  void finish() {
    while (!ended_) {
      more();
      if (filled_) throw Failure("this file is damaged; copy it again");
    }
  }

 private:
  void more() {
    given_ = filled_ = 0;
    while (filled_ == 0 && !ended_) {
      if (input_.pos == input_.size) {
        const size_t piece = std::min<uint64_t>(left_, in_.size());
        if (piece == 0) break;
        const std::string bytes = read_at(fd_, offset_, piece);
        std::copy(bytes.begin(), bytes.end(), in_.begin());
        input_ = {in_.data(), piece, 0};
        offset_ += static_cast<off_t>(piece);
        left_ -= piece;
      }
      ZSTD_outBuffer output{out_.data(), out_.size(), 0};
      const size_t result = ZSTD_decompressStream(context_, &output, &input_);
      if (ZSTD_isError(result)) throw Failure("this file is damaged; copy it again");
      ended_ = result == 0;
      filled_ = output.pos;
    }
    if (filled_ == 0 && !ended_) throw Failure("this file is cut short; copy it again");
  }

  int fd_;
  off_t offset_;
  uint64_t left_;
  std::string in_, out_;
  ZSTD_DCtx* context_;
  ZSTD_inBuffer input_{nullptr, 0, 0};
  size_t given_ = 0, filled_ = 0;
  bool ended_ = false;
};

void write_file(const fs::path& path, const Entry& entry, Stream& stream) {
  const Fd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (file.number < 0) throw failure(path);
  stream.copy_to(file.number, entry.size, path);
  const timespec times[2] = {kTime, kTime};
  if (fchmod(file.number, entry.mode) != 0 || futimens(file.number, times) != 0)
    throw failure(path);
}

void unpack(const fs::path& folder, const std::vector<Entry>& entries, Stream& stream) {
  if (mkdir(folder.c_str(), 0700) != 0) throw failure(folder);
  for (const Entry& entry : entries) {
    const fs::path path = folder / entry.path;
    fs::create_directories(path.parent_path());
    if (!entry.link)
      write_file(path, entry, stream);
    else if (symlink(entry.target.c_str(), path.c_str()) != 0)
      throw failure(path);
  }
  stream.finish();
  const Fd opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // On disk before the rename makes it visible: else a crash could leave a copy that looks whole.
  if (opened.number < 0 || syncfs(opened.number) != 0) throw failure(folder);
}

void make_copy(const fs::path& copy, const Trailer& trailer, const std::vector<Entry>& entries,
               Stream& stream) {
  const fs::path part = copy.string() + ".part";
  fs::remove_all(part);  // of a start that was killed; we hold the lock
  struct statvfs disk {};
  if (statvfs(copy.parent_path().c_str(), &disk) != 0) throw failure(copy.parent_path());
  const uint64_t room = static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize;
  const uint64_t wanted = trailer.unpacked_bytes + kSpareBytes;
  if (room < wanted)
    throw Failure("unpacking takes " + std::to_string(wanted >> 20) + " MiB in " +
                  copy.parent_path().string() + ", where " + std::to_string(room >> 20) +
                  " MiB are free; make room or name another folder in PDNODE_CACHE");
  std::fprintf(stderr, "pdnode: unpacking into %s, once\n", copy.c_str());
  try {
    unpack(part, entries, stream);
    fs::remove_all(copy);  // a damaged one
    fs::rename(part, copy);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(part, ignored);
    throw;
  }
}

// Path of the program in a copy that is whole.
fs::path ready_program(int self, off_t size) {
  const Trailer trailer = read_trailer(self, size);
  const off_t index_start =
      size - static_cast<off_t>(kTrailerBytes) - static_cast<off_t>(trailer.index_bytes);
  const std::vector<Entry> entries =
      read_index(read_at(self, index_start, trailer.index_bytes));
  const fs::path base = choose_base();
  const fs::path copy = base / ("program-" + trailer.hash.substr(0, 32));
  const auto whole = [&] {
    return distrust(copy, true).empty() && difference(copy, entries).empty();
  };
  if (whole()) return copy / kProgram;

  const std::string lock_path = copy.string() + ".lock";
  const Fd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (lock.number < 0 || flock(lock.number, LOCK_EX) != 0) throw failure(lock_path);
  if (whole()) return copy / kProgram;  // another start has made it meanwhile
  if (fs::exists(fs::symlink_status(copy))) {
    const std::string why = distrust(copy, true);
    if (why == "belongs to another user") throw Failure(copy.string() + ": " + why);
    const std::string what = why.empty() ? difference(copy, entries) + " has changed" : why;
    std::fprintf(stderr, "pdnode: %s is damaged (%s)\n", copy.c_str(), what.c_str());
  }
  Stream stream(self, index_start - static_cast<off_t>(trailer.payload_bytes),
                trailer.payload_bytes);
  make_copy(copy, trailer, entries, stream);
  return copy / kProgram;
}

}  // namespace

int main(int, char** argv) {
  try {
    const Fd self(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    struct stat found {};
    if (self.number < 0 || fstat(self.number, &found) != 0) throw failure("/proc/self/exe");
    const fs::path program = ready_program(self.number, found.st_size);
    execv(program.c_str(), argv);
    throw failure(program.string() + " cannot be run (is its file system mounted noexec?)");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pdnode: %s\n", error.what());
    return kHostLacks;
  }
}
