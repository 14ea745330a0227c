/* Keep a dev cluster's daemons on the loopback interface, or with --network on that of its nodes (ADDRESS).
 *
 * Slurm's daemons listen on every interface, or (CommunicationParameters=NoInAddrAny) on the address that
 * the host's name resolves to, which is seldom a loopback address. Preloaded into them, this turns a bind()
 * to every IPv4 or IPv6 address into one to that address (of IPv6 the loopback one), and touches no other.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

typedef int bind_function(int, const struct sockaddr *, socklen_t);

int bind(int fd, const struct sockaddr *address, socklen_t length)
{
    bind_function *next = (bind_function *)dlsym(RTLD_NEXT, "bind");
    if (address && address->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) {
        struct sockaddr_in in;
        memcpy(&in, address, sizeof in);
        if (in.sin_addr.s_addr == htonl(INADDR_ANY)) {
            in.sin_addr.s_addr = inet_addr(ADDRESS);
            return next(fd, (struct sockaddr *)&in, sizeof in);
        }
    } else if (address && address->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6)) {
        struct sockaddr_in6 in6;
        memcpy(&in6, address, sizeof in6);
        if (IN6_IS_ADDR_UNSPECIFIED(&in6.sin6_addr)) {
            in6.sin6_addr = in6addr_loopback;
            return next(fd, (struct sockaddr *)&in6, sizeof in6);
        }
    }
    return next(fd, address, length);
}
