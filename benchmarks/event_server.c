/* A bare event server for benchmarks of the load generator.
 *
 *   server GAP_US FIRST_US TRUTH_FILE      (prints its port; ends on SIGTERM or with its parent)
 *
 * Speaks just enough HTTP/1.1 for a completion client: any POST is answered with a chunked event
 * stream of `max_tokens` token events (the number after that name in the body), the first FIRST_US
 * after the request's last byte was read, the others GAP_US apart, on an absolute schedule, then
 * usage and [DONE]; under /chat/completions they are deltas of a message. GET is answered with a small JSON list of models.
 *
 * One thread that never sleeps (give it a core of its own): it polls sockets and deadlines in turn.
 * Truth: one line per response, "request_id arrival_ns write_ns...", CLOCK_MONOTONIC, each stamp
 * taken right before the send() that carries that token event.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_FD 8192
#define IN_BYTES (256 * 1024)
#define MAX_TOKENS 4096

TAILQ_HEAD(queue, connection);

struct connection {
    char *in;
    size_t in_used;
    int chat;
    int tokens, sent, prompt_tokens;
    int64_t arrival_ns, due_ns;
    char id[128];
    int64_t *writes;
    struct queue *queue; /* in which it waits for its next token, NULL if in none */
    TAILQ_ENTRY(connection) place;
};

static struct connection connections[MAX_FD];
/* Those before their first token, and after it. In each all wait equally long: the first is due first. */
static struct queue fresh = TAILQ_HEAD_INITIALIZER(fresh), begun = TAILQ_HEAD_INITIALIZER(begun);
static int64_t gap_ns, first_ns;
static FILE *truth;
static volatile sig_atomic_t stopping;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void enter(struct connection *c, struct queue *queue) {
    TAILQ_INSERT_TAIL(queue, c, place);
    c->queue = queue;
}

static void leave(struct connection *c) {
    if (c->queue) TAILQ_REMOVE(c->queue, c, place);
    c->queue = NULL;
}

/* The connection whose token is due first, NULL if none is. */
static struct connection *next_due(void) {
    struct connection *a = TAILQ_FIRST(&fresh), *b = TAILQ_FIRST(&begun);
    return !b || (a && a->due_ns < b->due_ns) ? a : b;
}

static void drop(int fd) {
    leave(&connections[fd]);
    connections[fd].in_used = 0;
    close(fd);
}

/* The benchmarked loads stay far below the socket buffer; a full one means a stuck client. */
static int send_all(int fd, const char *data, size_t size) {
    ssize_t n = send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n == (ssize_t)size) return 0;
    drop(fd);
    return -1;
}

static int chunk(char *out, size_t room, const char *data) {
    return snprintf(out, room, "%zx\r\n%s\r\n", strlen(data), data);
}

static void send_token(int fd) {
    struct connection *c = &connections[fd];
    static const char token[] =
        "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\","
        "\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,%s,"
        "\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null}],\"usage\":null}\n\n";
    char event[512], out[2048];
    int last = c->sent + 1 == c->tokens, used = 0;
    if (c->sent == 0)
        used = snprintf(out, sizeof out,
                        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                        "transfer-encoding: chunked\r\n\r\n");
    snprintf(event, sizeof event, token,
             c->chat ? "\"delta\":{\"content\":\" tok\"}" : "\"text\":\" tok\"",
             last ? "\"length\"" : "null");
    used += chunk(out + used, sizeof out - used, event);
    c->writes[c->sent++] = now_ns();
    if (send_all(fd, out, used) < 0) return;
    leave(c);
    if (!last) {
        c->due_ns += gap_ns;
        enter(c, &begun);
        return;
    }
    snprintf(event, sizeof event,
             "data: {\"id\":\"cmpl-0\",\"object\":\"text_completion\",\"created\":1700000000,"
             "\"model\":\"m\",\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,"
             "\"completion_tokens\":%d}}\n\n",
             c->prompt_tokens, c->prompt_tokens + c->tokens, c->tokens);
    used = chunk(out, sizeof out, event);
    used += chunk(out + used, sizeof out - used, "data: [DONE]\n\n");
    used += snprintf(out + used, sizeof out - used, "0\r\n\r\n");
    fprintf(truth, "%s %lld", c->id, (long long)c->arrival_ns);
    for (int i = 0; i < c->sent; i++) fprintf(truth, " %lld", (long long)c->writes[i]);
    fputc('\n', truth);
    send_all(fd, out, used);
}

static int number_after(const char *text, const char *name, int fallback) {
    const char *found = strstr(text, name);
    return found ? atoi(found + strlen(name) + strspn(found + strlen(name), "\": ")) : fallback;
}

/* A token-id prompt is counted by its commas; any other prompt counts as one token. */
static int count_prompt(const char *body) {
    const char *at = strstr(body, "\"prompt\"");
    if (!at || !(at = strchr(at, ':'))) return 1;
    at += 1 + strspn(at + 1, " ");
    if (*at != '[') return 1;
    int count = 1;
    for (; *at && *at != ']'; at++) count += *at == ',';
    return count;
}

static void begin(int fd, char *head, char *body, int64_t arrival_ns) {
    struct connection *c = &connections[fd];
    if (strncmp(head, "POST", 4) != 0) {
        static const char models[] =
            "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\"}]}";
        char out[256];
        int used = snprintf(out, sizeof out,
                            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                            "content-length: %zu\r\n\r\n%s", strlen(models), models);
        send_all(fd, out, used);
        return;
    }
    const char *id = strcasestr(head, "\r\nx-request-id:");
    if (!id || sscanf(id + 15, " %127[^\r]", c->id) != 1) strcpy(c->id, "-");
    c->tokens = number_after(body, "\"max_tokens\"", 0);
    if (c->tokens == 0) c->tokens = number_after(body, "\"max_completion_tokens\"", 16);
    if (c->tokens < 1 || c->tokens > MAX_TOKENS) {
        drop(fd);
        return;
    }
    c->chat = strstr(head, "/chat/completions ") != NULL;
    c->prompt_tokens = count_prompt(body);
    c->sent = 0;
    c->arrival_ns = arrival_ns;
    c->due_ns = arrival_ns + first_ns;
    enter(c, &fresh);
}

static void on_readable(int fd) {
    struct connection *c = &connections[fd];
    ssize_t n = recv(fd, c->in + c->in_used, IN_BYTES - 1 - c->in_used, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        drop(fd);
        return;
    }
    int64_t arrival_ns = now_ns();
    c->in_used += n;
    c->in[c->in_used] = 0;
    char *end = strstr(c->in, "\r\n\r\n");
    if (!end || c->queue) return;
    const char *length = strcasestr(c->in, "content-length:");
    size_t body = length && length < end ? (size_t)atoi(length + 15) : 0;
    size_t whole = (end + 4 - c->in) + body;
    if (c->in_used < whole) return;
    *end = 0;
    begin(fd, c->in, end + 4, arrival_ns);
    c->in_used = 0; /* clients of these benchmarks do not pipeline */
}

static void on_term(int number) {
    (void)number;
    stopping = 1;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: server GAP_US FIRST_US TRUTH_FILE\n");
        return 2;
    }
    gap_ns = (int64_t)(atof(argv[1]) * 1000);
    first_ns = (int64_t)(atof(argv[2]) * 1000);
    truth = fopen(argv[3], "w");
    if (!truth) {
        perror(argv[3]);
        return 1;
    }
    signal(SIGTERM, on_term);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* it never sleeps: left behind, it would burn its core */
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) < 0 || listen(listener, 4096) < 0) {
        perror("listen");
        return 1;
    }
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    int poller = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, ready[256];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    while (!stopping) {
        struct connection *due;
        while ((due = next_due()) && due->due_ns <= now_ns()) send_token(due - connections);
        int count = epoll_wait(poller, ready, 256, 0);
        for (int i = 0; i < count; i++) {
            int fd = ready[i].data.fd;
            if (fd != listener) {
                on_readable(fd);
                continue;
            }
            fd = accept(listener, NULL, NULL);
            if (fd < 0 || fd >= MAX_FD) {
                if (fd >= 0) close(fd);
                continue;
            }
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            struct connection *c = &connections[fd];
            if (!c->in) c->in = malloc(IN_BYTES);
            if (!c->writes) c->writes = malloc(MAX_TOKENS * sizeof *c->writes);
            c->in_used = 0;
            event.data.fd = fd;
            epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
        }
    }
    fclose(truth);
    return 0;
}
