#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <time.h>
#include "../selfattn.h"
static double now(){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+1e-9*t.tv_nsec;}
int main(int c,char**v){
 int th=c>1?atoi(v[1]):1; int isf64=c>2?atoi(v[2]):0; int causal=c>3?atoi(v[3]):0; if(c>4) if(sa_isa_set(v[4])) return 9;
 size_t it=isf64?8:4; int Ls[]={128,512,1024,4096},Ds[]={32,64,80,128};
 double peak=sa_measure_flops(isf64,th,.3); printf("isa %s peak %.1f\n",sa_isa_name(),peak/1e9);
 for(int li=0;li<4;li++)for(int di=0;di<4;di++){int H=8,L=Ls[li],D=Ds[di];
  size_t n=(size_t)H*L*D; char*q=aligned_alloc(64,n*it),*k=aligned_alloc(64,n*it),*vv=aligned_alloc(64,n*it),*o=aligned_alloc(64,n*it);
  for(size_t i=0;i<n;i++){ double x[3]; for(int j=0;j<3;j++) x[j]=(rand()/(double)RAND_MAX-.5)*3.4; if(isf64){((double*)q)[i]=x[0];((double*)k)[i]=x[1];((double*)vv)[i]=x[2];}else{((float*)q)[i]=x[0];((float*)k)[i]=x[1];((float*)vv)[i]=x[2];}}
  sa_attention a; memset(&a,0,sizeof a); a.L=a.S=L;a.E=a.Dv=D;a.n_lead=1;a.lead[0]=H;a.gqa=1;a.f64=isf64;a.scale=1/sqrt(D);a.causal=causal;a.window_left=a.window_right=SA_UNBOUNDED;
  sa_tensor t; memset(&t,0,sizeof t); t.m.row_stride=D*it;t.m.col_stride=it;t.m.dtype=isf64?SA_F64:SA_F32;t.lead_stride[0]=(ptrdiff_t)L*D*it;
  t.m.data=q;a.query=t;t.m.data=k;a.key=t;t.m.data=vv;a.value=t;t.m.data=o;a.out=t;
  sa_attention_plan p; if(sa_attention_make_plan(&a,th,&p)) return 1; 
  void*s=aligned_alloc(64,p.threads*p.scratch_bytes),*pa=aligned_alloc(64,p.partial_bytes+64);
  peak=sa_measure_flops(isf64,th,.03); double fl=4.*H*L*(double)L*D/(causal?2:1), best=1e9; int reps=2e11/fl/8; if(reps<6)reps=6; if(reps>600)reps=600;
  for(int r=0;r<reps;r++){double s0=now(); sa_attention_forward(&a,&p,s,pa); s0=now()-s0; if(s0<best)best=s0;}
  double pk2=sa_measure_flops(isf64,th,.02); if(pk2>peak)peak=pk2;
  printf("L%d D%d %.1f GF %.1f%%  ",L,D,fl/best/1e9,100*fl/best/peak); if(di==3)printf("\n"); fflush(stdout);
  free(q);free(k);free(vv);free(o);free(s);free(pa);} }
